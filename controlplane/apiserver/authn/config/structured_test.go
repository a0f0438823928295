package config

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"keelson.dev/keelson/controlplane/apiserver/authn/issuer/issuertest"
	"keelson.dev/keelson/controlplane/apiserver/cel"
	"keelson.dev/keelson/internal/await"
)

func file(t *testing.T, path, text string) string {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func load(o Options) (*Authentication, error) {
	return Load(Config{
		Options: o, Compilers: cel.New(), Audiences: []string{"api"}, Disallowed: []string{"https://own"},
		Clock: time.Now, Log: slog.New(slog.DiscardHandler),
	})
}

// run loads the options and follows their files until the test ends.
func run(t *testing.T, o Options) *Authentication {
	t.Helper()
	a, err := load(o)
	if err != nil {
		t.Fatal(err)
	}
	a.reloadPeriod, a.patience = time.Millisecond, 50*time.Millisecond
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { defer close(done); _ = a.Run(ctx) }()
	t.Cleanup(func() { cancel(); <-done })
	return a
}

// becomes waits until the token authenticates the given user; "" = no user.
func becomes(t *testing.T, a *Authentication, token, user string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	await.Until(ctx, t, await.Patience, time.Millisecond, "the user of the token", func() error {
		if id, ok, err := (issuerTokens{a}).VerifyToken(ctx, token, nil); id.User.Name != user || ok != (user != "") {
			return fmt.Errorf("%q, %t, %v; want %q", id.User.Name, ok, err, user)
		}
		return nil
	})
}

// Contradictory flags, and flags without another required flag, are rejected with the flag's name.
func TestOptionsAreChecked(t *testing.T) {
	for words, change := range map[string]func(*Options){
		"--oidc-issuer-url and --oidc-client-id must be set together": func(o *Options) { o.OIDC.ClientID = "c" },
		"cannot be combined": func(o *Options) {
			o.ConfigFile, o.OIDC.IssuerURL = "f", "https://i"
		},
		"--requestheader-client-ca-file":           func(o *Options) { o.RequestHeader.GroupHeaders = []string{"X"} },
		"--requestheader-username-headers":         func(o *Options) { o.RequestHeader.ClientCAFile = "f" },
		"--authentication-token-webhook-cache-ttl": func(o *Options) { o.WebhookTTL = -1 },
		"--token-auth-file":                        func(o *Options) { o.TokenFile = "/none" },
		"--authentication-token-webhook-config":    func(o *Options) { o.WebhookConfig = "/none" },
		"--oidc-ca-file": func(o *Options) {
			o.OIDC.IssuerURL, o.OIDC.ClientID, o.OIDC.CAFile = "https://i", "c", "/none"
		},
		"signing algorithm": func(o *Options) {
			o.OIDC.IssuerURL, o.OIDC.ClientID, o.OIDC.SigningAlgs = "https://i", "c", []string{"none"}
		},
	} {
		o := Defaults()
		change(&o)
		if _, err := load(o); err == nil || !strings.Contains(err.Error(), words) {
			t.Errorf("%s: %v", words, err)
		}
	}
}

// An invalid file is rejected with the names of the field and of the file.
func TestConfigurationFileIsChecked(t *testing.T) {
	path := filepath.Join(t.TempDir(), "authn.yaml")
	head := "apiVersion: apiserver.config.k8s.io/v1\nkind: AuthenticationConfiguration\n"
	for text, words := range map[string]string{
		"":                             "is empty",
		head + "unknown: 1":            "unknown field",
		head + "jwt: [{issuer: {}}]":   "jwt[0].issuer.url: Required value",
		"apiVersion: v1\nkind: Secret": "no kind",
		"apiVersion: apiserver.config.k8s.io/v1\nkind: " +
			"AuthorizationConfiguration\nauthorizers: []": "want an AuthenticationConfiguration",
		head + "jwt: [{issuer: {url: 'https://own', audiences: [a]}, claimMappings: {username: {claim: sub, prefix: " +
			"''}}}]": "disallowed",
		head + "jwt: [{issuer: {url: 'https://i', audiences: [a]}, claimMappings: {username: {expression: " +
			"'claims.'}}}]": "claimMappings.username.expression",
		head + "jwt: [{issuer: {url: 'https://i', audiences: [a], egressSelectorType: cluster}, claimMappings: " +
			"{username: {claim: sub, prefix: ''}}}]": "egressSelectorType",
		head + "anonymous: {enabled: false, conditions: [{path: " +
			"/livez}]}": "anonymous.conditions",
	} {
		o := Defaults()
		o.ConfigFile = file(t, path, text)
		if _, err := load(o); err == nil || !strings.Contains(err.Error(), words) ||
			!strings.Contains(err.Error(), path) {
			t.Errorf("%s: %v; want %q", text, err, words)
		}
	}
	yes := true
	o := Defaults()
	o.ConfigFile, o.Anonymous = file(t, path, head+"anonymous: {enabled: true}"), &yes
	if _, err := load(o); err == nil || !strings.Contains(err.Error(), "--anonymous-auth") {
		t.Errorf("anonymous in two places: %v", err)
	}
}

// The --oidc-* flags configure one issuer, with the prefixes of Kubernetes.
func TestOIDCFlags(t *testing.T) {
	p := issuertest.New(t)
	ca := file(t, filepath.Join(t.TempDir(), "ca.pem"), p.CA())
	token := p.Token(map[string]any{"email": "a@example.org", "groups": []string{"x"}, "hd": "example.org"})
	for name, c := range map[string]struct {
		change func(*OIDC)
		user   string
	}{
		"plain":      {func(*OIDC) {}, p.URL + "#alice"},
		"no prefix":  {func(o *OIDC) { o.UsernamePrefix = "-" }, "alice"},
		"own prefix": {func(o *OIDC) { o.UsernamePrefix = "o:" }, "o:alice"},
		"mail":       {func(o *OIDC) { o.UsernameClaim = "email" }, "a@example.org"},
		"required": {func(o *OIDC) {
			o.UsernamePrefix, o.RequiredClaims = "-", map[string]string{"hd": "example.org"}
		}, "alice"},
		"not as such": {func(o *OIDC) { o.RequiredClaims = map[string]string{"hd": "elsewhere.org"} }, ""},
	} {
		t.Run(name, func(t *testing.T) {
			o := Defaults()
			o.OIDC.IssuerURL, o.OIDC.ClientID, o.OIDC.CAFile, o.OIDC.GroupsClaim, o.OIDC.GroupsPrefix = p.URL,
				"keelson", ca, "groups", "g:"
			c.change(&o.OIDC)
			a := run(t, o)
			<-a.current.Load().issuers[0].Ready()
			becomes(t, a, token, c.user)
			if id, _, _ := (issuerTokens{a}).VerifyToken(t.Context(), token, nil); c.user != "" &&
				(len(id.User.Groups) != 1 || id.User.Groups[0] != "g:x") {
				t.Errorf("groups %v", id.User.Groups)
			}
		})
	}
}

func configuration(prefix string, all ...*issuertest.Provider) string {
	text := "apiVersion: apiserver.config.k8s.io/v1\nkind: AuthenticationConfiguration\njwt:\n"
	for _, p := range all {
		text += fmt.Sprintf("- issuer:\n    url: %s\n    audiences: [keelson]\n    certificateAuthority: |\n      "+
			"%s\n  claimMappings: {username: {claim: sub, prefix: '%s'}}\n",
			p.URL, strings.ReplaceAll(strings.TrimSpace(p.CA()), "\n", "\n      "), prefix)
	}
	return text
}

// An unresponsive issuer delays neither the addition nor the removal of other issuers. An unchanged
// issuer is not discovered again.
func TestHangingIssuerHoldsNothingUp(t *testing.T) {
	one, two, hangs := issuertest.New(t), issuertest.New(t), issuertest.New(t)
	open := make(chan struct{})
	hangs.Change(func(b *issuertest.Behavior) { b.Hang = open })
	path := file(t, filepath.Join(t.TempDir(), "authn.yaml"), configuration("1:", one, two))
	o := Defaults()
	o.ConfigFile = path
	a := run(t, o)
	becomes(t, a, one.Token(nil), "1:alice")
	becomes(t, a, two.Token(nil), "1:alice")
	fetched := two.Fetches.Load()
	file(t, path, configuration("1:", hangs, two))
	becomes(t, a, one.Token(nil), "")
	becomes(t, a, two.Token(nil), "1:alice")
	if two.Fetches.Load() != fetched {
		t.Error("an issuer that stayed as it was has been asked for its keys again")
	}
	close(open)
	becomes(t, a, hangs.Token(nil), "1:alice")
}
