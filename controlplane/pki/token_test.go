package pki

import (
	"bytes"
	"crypto/ecdsa"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	clientcmdlatest "k8s.io/client-go/tools/clientcmd/api/latest"
)

func TestJoinToken(t *testing.T) {
	ca := newTrust(t).CA
	tok := NewToken(RoleControlPlane, ca.Cert)
	back, err := ParseToken(tok.String())
	if err != nil || back != tok || back.CAHash != ca.Hash() {
		t.Fatalf("parsed %+v, %v; want %+v", back, err, tok)
	}
	text := tok.String()
	for what, s := range map[string]string{
		"empty":         "",
		"version":       strings.Replace(text, "keelson1", "keelson2", 1),
		"role":          strings.Replace(text, "controlplane", "admin", 1),
		"part missing":  text[:strings.LastIndex(text, ".")],
		"short hash":    text[:len(text)-1],
		"capital in id": strings.Replace(text, "."+tok.ID+".", ".ABCDEF.", 1),
		"short secret":  strings.Replace(text, tok.Secret, tok.Secret[1:], 1),
		"newline":       text + "\n",
	} {
		_, err := ParseToken(s)
		if !errors.Is(err, ErrMalformed) {
			t.Errorf("%s: %v, want ErrMalformed", what, err)
		}
		if err != nil && strings.Contains(err.Error(), tok.Secret[1:]) {
			t.Errorf("%s: the error holds the secret: %v", what, err)
		}
	}
	var log bytes.Buffer
	slog.New(slog.NewTextHandler(&log, nil)).Info("joining", "token", tok)
	if strings.Contains(log.String(), tok.Secret) || !strings.Contains(log.String(), tok.ID) {
		t.Errorf("logged as %q", log.String())
	}
}

func TestTokenRecord(t *testing.T) {
	trust := newTrust(t)
	key, tok := trust.TokenKey(), NewToken(RoleNode, trust.CA.Cert)
	grant := Grant{Expires: t0.Add(time.Hour), Uses: 2, Note: "for w1"}
	record := key.Record(tok, grant)
	for _, v := range record.Data {
		if bytes.Contains(v, []byte(tok.Secret)) {
			t.Error("the Secret holds the token's secret")
		}
	}
	guess, upgraded := tok, tok
	guess.Secret = strings.Repeat("a", tokenKeyLen)
	upgraded.Role = RoleControlPlane
	changed := func(change func(s *corev1.Secret)) *corev1.Secret {
		s := record.DeepCopy()
		change(s)
		return s
	}
	named := grant
	named.Names = []string{"w1", "w2"}
	for _, c := range []struct {
		what   string
		tok    Token
		record *corev1.Secret
		name   string
		now    time.Time
		want   error
	}{
		{"good", tok, record, "w9", t0, nil},
		{"expired", tok, record, "w9", t0.Add(time.Hour), ErrExpired},
		{"wrong secret", guess, record, "w9", t0, ErrWrongSecret},
		{"more than it may", upgraded, record, "w9", t0, ErrWrongRole},
		{"no Secret", tok, nil, "w9", t0, ErrMalformed},
		{"some Secret", tok, changed(func(s *corev1.Secret) {
			s.Type = corev1.SecretTypeOpaque
		}), "w9", t0, ErrMalformed},
		{"longer", tok, changed(func(s *corev1.Secret) {
			s.Data["expiration"] = []byte("2099-01-01T00:00:00Z")
		}), "w9", t0, ErrForged},
		{"more uses", tok, changed(func(s *corev1.Secret) { s.Data["uses"] = []byte("9") }), "w9", t0, ErrForged},
		{"one field more", tok, changed(func(s *corev1.Secret) {
			s.Data["replace"] = []byte("true")
		}), "w9", t0, ErrForged},
		{"one field less", tok, changed(func(s *corev1.Secret) { delete(s.Data, "mac") }), "w9", t0, ErrForged},
		{"of another cluster", tok, newTrust(t).TokenKey().Record(tok, grant), "w9", t0, ErrForged},
		{"named", tok, key.Record(tok, named), "w2", t0, nil},
		{"not named", tok, key.Record(tok, named), "w3", t0, ErrWrongName},
	} {
		if _, err := key.CheckToken(c.tok, c.record, c.name, c.now); !errors.Is(err, c.want) {
			t.Errorf("%s: %v, want %v", c.what, err, c.want)
		}
	}
}

// A token counts its uses. A client that retries after a lost response does not use it again.
func TestTokenUses(t *testing.T) {
	trust := newTrust(t)
	key, tok := trust.TokenKey(), NewToken(RoleNode, trust.CA.Cert)
	record := key.Record(tok, Grant{Expires: t0.Add(time.Hour), Uses: 2})
	use := func(user string) error {
		next, err := key.UseToken(tok, record, "w", user, t0)
		if next != nil {
			record = next
		}
		return err
	}
	first := record
	for i, c := range []struct {
		user string
		want error
	}{{"a", nil}, {"a", nil}, {"b", nil}, {"a", nil}, {"c", ErrUsedUp}, {"b", nil}} {
		if err := use(c.user); !errors.Is(err, c.want) {
			t.Errorf("use %d, by %s: %v, want %v", i, c.user, err, c.want)
		}
	}
	if string(first.Data["used"]) != "0" {
		t.Error("the record that was given has changed")
	}
	many := key.Record(tok, Grant{Expires: t0.Add(time.Hour), Uses: 1000})
	for i := range 1000 {
		next, err := key.UseToken(tok, many, "w", fmt.Sprint("node-", i), t0)
		if err != nil {
			t.Fatal(err)
		}
		many = next
	}
	if n := len(many.Data["used-by"]); n > 1000 {
		t.Errorf("the record names its users in %d bytes", n)
	}
}

func newTokens(t *testing.T, issuer string, tr *Trust, old ...*ecdsa.PublicKey) *ServiceTokens {
	t.Helper()
	s, err := NewServiceTokens(issuer, tr.ServiceKey, old...)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func TestServiceAccountToken(t *testing.T) {
	tr, other := newTrust(t), newTrust(t)
	tokens := newTokens(t, DefaultIssuer, tr)
	ask := Claims{Namespace: "default", ServiceAccount: Ref{"app", "u1"},
		Pod: &Ref{"p", "u2"}, Node: &Ref{"w1", "u3"}}
	text, signed, err := tokens.Sign(ask, time.Hour, t0)
	if err != nil {
		t.Fatal(err)
	}
	got, err := tokens.Verify(text, nil, t0)
	if err != nil {
		t.Fatal(err)
	}
	if got.ID == "" || got.ID != signed.ID || !got.Expiry.Equal(t0.Add(time.Hour)) ||
		*got.Pod != *ask.Pod || *got.Node != *ask.Node || got.ServiceAccount != ask.ServiceAccount {
		t.Errorf("verified %+v, signed %+v", got, signed)
	}
	// F22
	if u := got.User(); u.Name != "system:serviceaccount:default:app" || u.UID != "u1" ||
		strings.Join(u.Groups, " ") != "system:serviceaccounts system:serviceaccounts:default system:authenticated" ||
		u.Extra["authentication.kubernetes.io/pod-name"][0] != "p" {
		t.Errorf("user %+v", u)
	}

	ask.Audiences = []string{"vault"}
	forVault, _, _ := tokens.Sign(ask, time.Hour, t0)
	foreign, _, _ := newTokens(t, DefaultIssuer, other).Sign(ask, time.Hour, t0)
	otherIssuer, _, _ := newTokens(t, "https://elsewhere", tr).Sign(ask, time.Hour, t0)
	parts := strings.Split(text, ".")
	swapped := strings.Join([]string{parts[0], strings.Split(forVault, ".")[1], parts[2]}, ".")
	none := "eyJhbGciOiJub25lIn0." + parts[1] + "."
	for _, c := range []struct {
		name string
		text string
		aud  []string
		now  time.Time
		want error
	}{
		{"good", text, []string{"x", DefaultIssuer}, t0, nil},
		{"for vault", forVault, []string{"vault"}, t0, nil},
		{"wrong audience", forVault, nil, t0, ErrAudience},
		{"expired", text, nil, t0.Add(time.Hour + tokenLeeway), ErrExpired},
		{"clocks differ a little", text, nil, t0.Add(-tokenLeeway), nil},
		{"not yet", text, nil, t0.Add(-time.Minute), ErrNotYetValid},
		{"another cluster", foreign, nil, t0, ErrSignature},
		{"claims swapped", swapped, nil, t0, ErrSignature},
		{"another issuer", otherIssuer, nil, t0, ErrIssuer},
		{"unsigned", none, nil, t0, ErrSignature},
		{"no token", "abc", nil, t0, ErrMalformed},
		{"empty", "", nil, t0, ErrMalformed},
	} {
		_, err := tokens.Verify(c.text, c.aud, c.now)
		if !errors.Is(err, c.want) {
			t.Errorf("%s: %v, want %v", c.name, err, c.want)
		}
		if err != nil && c.text != "" && strings.Contains(err.Error(), c.text) {
			t.Errorf("%s: the error holds the token", c.name)
		}
	}
	// After a key rotation, tokens of the old key are valid while the key is listed.
	renewed := newTokens(t, DefaultIssuer, other, &tr.ServiceKey.PublicKey)
	if _, err := renewed.Verify(text, nil, t0); err != nil {
		t.Errorf("token of the old key: %v", err)
	}
	var set struct{ Keys []map[string]any }
	data, err := renewed.JWKS()
	if err == nil {
		err = json.Unmarshal(data, &set)
	}
	if err != nil || len(set.Keys) != 2 || set.Keys[0]["d"] != nil || set.Keys[0]["alg"] != "ES256" {
		t.Errorf("JWKS %s, %v", data, err)
	}
}

func TestTokenOfSecret(t *testing.T) {
	tr, other := newTrust(t), newTrust(t)
	tokens := newTokens(t, DefaultIssuer, tr)
	ask := SecretClaims{Namespace: "default", ServiceAccount: Ref{"app", "u1"}, Secret: "s"}
	sign := func(by *ServiceTokens, c SecretClaims) string {
		text, err := by.SignForSecret(c)
		if err != nil {
			t.Fatal(err)
		}
		return text
	}
	good := sign(tokens, ask)
	got, err := tokens.VerifySecretToken(good)
	if err != nil || *got != ask {
		t.Fatalf("verified %+v, %v", got, err)
	}
	if u := got.User(); u.Name != "system:serviceaccount:default:app" || u.UID != "u1" || len(u.Extra) > 0 {
		t.Errorf("user %+v", u)
	}
	// The claims have the names that other verifiers expect.
	payload, err := base64.RawURLEncoding.DecodeString(strings.Split(good, ".")[1])
	want := `{"iss":"kubernetes/serviceaccount","kubernetes.io/serviceaccount/namespace":"default",` +
		`"kubernetes.io/serviceaccount/secret.name":"s",` +
		`"kubernetes.io/serviceaccount/service-account.name":"app",` +
		`"kubernetes.io/serviceaccount/service-account.uid":"u1","sub":"system:serviceaccount:default:app"}`
	var claims map[string]string
	if err == nil {
		err = json.Unmarshal(payload, &claims)
	}
	if sorted, _ := json.Marshal(claims); err != nil || string(sorted) != want {
		t.Errorf("claims %s, %v", sorted, err)
	}
	ends, _, _ := tokens.Sign(Claims{Namespace: "default", ServiceAccount: Ref{"app", "u1"}}, time.Hour, t0)
	parts, nameless := strings.Split(good, "."), ask
	nameless.Secret = ""
	for _, c := range []struct {
		name, text string
		want       error
	}{
		{"another cluster", sign(newTokens(t, DefaultIssuer, other), ask), ErrSignature},
		{"one that ends", ends, ErrIssuer},
		{"unsigned", "eyJhbGciOiJub25lIn0." + parts[1] + ".", ErrSignature},
		{"no Secret", sign(tokens, nameless), ErrMalformed},
		{"no token", "abc", ErrMalformed},
	} {
		if _, err := tokens.VerifySecretToken(c.text); !errors.Is(err, c.want) ||
			strings.Contains(err.Error(), c.text) {
			t.Errorf("%s: %v, want %v", c.name, err, c.want)
		}
	}
	if _, err := tokens.Verify(good, nil, t0); err == nil {
		t.Error("a token of a Secret passes for one that ends")
	}
}

func TestKubeconfig(t *testing.T) {
	path := filepath.Join(t.TempDir(), "config")
	k := Kubeconfig{Cluster: "lab", Server: "https://127.0.0.1:6443", CAPEM: []byte("ca"), CertPEM: []byte("c"),
		KeyPEM: []byte("k")}
	if err := k.Write(path); err != nil {
		t.Fatal(err)
	}
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	obj, err := runtime.Decode(clientcmdlatest.Codec, data) // F4
	if err != nil {
		t.Fatal(err)
	}
	c := obj.(*clientcmdapi.Config)
	ctx := c.Contexts[c.CurrentContext]
	if ctx == nil || c.Clusters[ctx.Cluster].Server != k.Server ||
		string(c.AuthInfos[ctx.AuthInfo].ClientKeyData) != "k" {
		t.Errorf("read back %+v", c)
	}
	if info, _ := os.Stat(path); info.Mode().Perm() != 0o600 {
		t.Errorf("mode %v", info.Mode())
	}
}

func FuzzParseToken(f *testing.F) {
	f.Add("keelson1.node.abcdef." + strings.Repeat("a", tokenKeyLen) + "." + strings.Repeat("0", 64))
	f.Add("keelson1.....")
	f.Fuzz(func(t *testing.T, s string) {
		tok, err := ParseToken(s)
		if err == nil && tok.String() != s {
			t.Errorf("%q parsed, but writes itself as %q", s, tok.String())
		}
		if err != nil && !errors.Is(err, ErrMalformed) {
			t.Errorf("%q: %v is not ErrMalformed", s, err)
		}
	})
}

func FuzzVerify(f *testing.F) {
	tr, err := NewTrust("lab", t0)
	if err != nil {
		f.Fatal(err)
	}
	tokens, err := NewServiceTokens(DefaultIssuer, tr.ServiceKey)
	if err != nil {
		f.Fatal(err)
	}
	good, _, err := tokens.Sign(Claims{Namespace: "n", ServiceAccount: Ref{"a", "u"}}, time.Hour, t0)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(good)
	f.Add("a.b.c")
	f.Add("{}")
	f.Fuzz(func(t *testing.T, s string) {
		c, err := tokens.Verify(s, nil, t0)
		if err == nil && (c.Namespace != "n" || c.ServiceAccount.UID != "u") {
			t.Errorf("%q was accepted as %+v", s, c)
		}
	})
}
