"""What counts as a secret, by name and by looks."""

import pytest

from services.wire.secret_text import (
    SecretFilter,
    hide_secrets,
    looks_secret,
    names_secret,
    scorer_environment,
    setting_is_secret,
    without_secrets,
)

SECRET_NAMES = (
    "openai_key OPENAI_KEY STRIPE_KEY api_key apiKey OPENAI_API_KEY AWS_SECRET_ACCESS_KEY "
    "PGPASSWORD db_password accessToken HF_TOKEN WANDB_API_KEY RAY_AUTH_TOKEN MYSQL_PWD GITHUB_PAT "
    "SENTRY_DSN DB_PASS SLACK_WEBHOOK_URL client_secret "
    "GOOGLE_APPLICATION_CREDENTIALS slack_webhook service-key my.secret"
    " OPENAI_API_KEY_2 API_TOKEN2 GH_TOKEN_RO SIGNING_KEY_BASE64 PRIVATE_KEY_PEM HF_TOKEN_2"
    " AZURE_STORAGE_CONNECTION_STRING HF_HUB_TOKEN_OLD"
)
HARMLESS_NAMES = (
    "answer_key sort_key key token max_completion_tokens eos_token TOKENIZERS_PARALLELISM pattern "
    "RAY_AUTH_MODE SSH_AUTH_SOCK monkey keyboard PWD OLDPWD HF_HOME tokenizer PATH keys turkey"
)
SECRET_TEXTS = {
    "openai": "sk-zq81heldback4471aa02",
    "anthropic": "sk-ant-api03-aaaaBBBB1111cccc2222",
    "stripe": "rk_live_51Habcdefghijk",
    "github": "ghp_16C7e42F292c6912E7710c838347Ae178B4a",
    "aws": "AKIAIOSFODNN7EXAMPLE",
    "google": "AIzaSyA-1234567890abcdefghijklmnopqrstu",
    "slack": "xoxb-123456789012-abcdefABCDEF",
    "hub": "hf_AbCdEfGhIjKlMnOpQrSt",
    "jwt": "eyJhbGciOiJIUzI1.eyJzdWIiOiIxMjM0.SflKxwRJSMeKKF2QT4",
    "url": "postgres://me:geheim123@db.example.org/x",
    "query": "https://example.org/v1?api_key=geheim123456",
    "pem": "-----BEGIN PRIVATE KEY-----\nMIIEvQ\n-----END PRIVATE KEY-----",
    "bearer": "Authorization: Bearer abcdef123456",
}
HARMLESS_TEXTS = (
    "sk-learn-style-pipelines-of-words",
    "https://example.org:8080/path?step=12345678",
    "the token count is 123456789012345678",
    "#### 42",
    "disk-based-storage-2000-and-more",
    "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
    "-----BEGIN EXAMPLE-----",
    "bearer instruments",
    "models/sk-learn-classifier-2024",
    "hf_smollm2instructgguf",
    "https://example.org/?monkey=bananas12",
)


@pytest.mark.parametrize("name", SECRET_NAMES.split())
def test_names_of_secrets_R12(name):
    assert names_secret(name)


@pytest.mark.parametrize("name", HARMLESS_NAMES.split())
def test_names_of_other_things(name):
    assert not names_secret(name)


def test_a_bare_key_is_a_secret_by_its_value():
    assert names_secret("token", "a1b2c3d4e5f6a7b8") and names_secret("key", "Zm9vYmFyMTIzNDU2")
    assert not names_secret("token", "####") and not names_secret("key", "final answer")


def test_parameters_may_be_named_like_keys_where_their_values_are_none():
    for name in ("label_key", "tool_token", "answer_pat", "secret_word", "tokens", "box_token"):
        assert not setting_is_secret(name, "answer_v2") and not setting_is_secret(name, "<box>")
    for name in ("openai_key", "hub_token", "client_secret"):
        assert setting_is_secret(name, "sk-zq81heldback4471aa02")
    assert setting_is_secret("db_password", "hunter2") and setting_is_secret("api_key", "short")


@pytest.mark.parametrize("text", SECRET_TEXTS.values(), ids=SECRET_TEXTS)
def test_what_looks_like_a_secret_is_known_and_hidden_wherever_it_stands_R12(text):
    for shown in (text, f"error at {text}", f"x={text}, y=1"):
        assert looks_secret(shown)
        hidden = hide_secrets(shown)
        assert not looks_secret(hidden)
        assert text not in hidden and "geheim" not in hidden and "MIIEvQ" not in hidden


@pytest.mark.parametrize("text", HARMLESS_TEXTS)
def test_what_does_not_is_left_alone(text):
    assert not looks_secret(text) and hide_secrets(text) == text


@pytest.mark.parametrize(
    "text",
    [
        '{"SecretAccessKey": "geheim/bPxRf"}',
        "AccountName=x;AccountKey=geheim12==;EndpointSuffix=y",
        "Authorization: Basic dXNlcjpnZWhlaW0=",
        "password=geheim22",
        "password: geheim!pass#word99",
        "host=db password=geheim dbname=x",
    ],
)
def test_what_stands_beside_a_name_that_leaves_no_doubt_is_hidden_in_logs(text):
    hidden = hide_secrets(text)
    assert "geheim" not in hidden and "dXNl" not in hidden and "<secret>" in hidden
    assert hide_secrets(hidden) == hidden


def test_values_of_secret_variables_are_hidden_by_name():
    clean = SecretFilter({"STRIPE_KEY": "plain-words-here", "MODE": "plain-words"}).clean
    assert clean("got plain-words-here and plain-words") == "got <STRIPE_KEY> and plain-words"


def test_scorers_get_a_list_of_variables_and_no_secret_R12():
    environ = {
        "PATH": "/bin",
        "HOME": "/root",
        "LC_ALL": "C.UTF-8",
        "TMPDIR": "/tmp",
        "no_proxy": "localhost",
        "https_proxy": "http://me:geheim123@proxy:8080",
        "HF_HOME": "/cache",
        "HF_TOKEN": "hf_AbCdEfGhIjKlMnOpQrSt",
        "STRIPE_KEY": "a",
        "OPENAI_KEY": "b",
        "DATABASE_URL": "postgres://me:geheim123@db/x",
        "RAY_ADDRESS": "10.0.0.1:6379",
        "JUDGE_URL": "https://judge",
    }
    assert set(scorer_environment(environ, [])) == {
        *("PATH", "HOME", "LC_ALL", "TMPDIR", "no_proxy", "HF_HOME")
    }
    listed = scorer_environment(environ, ["OPENAI_KEY", "JUDGE_URL", "NOT_SET"])
    assert listed["OPENAI_KEY"] == "b" and listed["JUDGE_URL"] == "https://judge"
    assert "NOT_SET" not in listed
    assert set(environ) - set(without_secrets(environ)) == {
        *("https_proxy", "HF_TOKEN", "STRIPE_KEY", "OPENAI_KEY", "DATABASE_URL")
    }
