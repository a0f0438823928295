package apiserver

import (
	"context"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	authnfile "keelson.dev/keelson/controlplane/apiserver/authn/config"
	"keelson.dev/keelson/controlplane/apiserver/authn/issuer/issuertest"
	authzfile "keelson.dev/keelson/controlplane/apiserver/authz/config"
	"keelson.dev/keelson/controlplane/apiserver/cel"
	"keelson.dev/keelson/controlplane/pki"
)

// access is the configuration files of a replica and the servers that they refer to.
type access struct {
	t      *testing.T
	folder string
	authn  authnfile.Options
	authz  authzfile.Options
}

func newAccess(t *testing.T) *access {
	return &access{t: t, folder: t.TempDir(), authn: authnfile.Defaults(), authz: authzfile.Defaults()}
}

// file writes a configuration file and returns its path.
func (a *access) file(name, text string) string {
	a.t.Helper()
	path := filepath.Join(a.folder, name)
	if err := os.WriteFile(path+".new", []byte(text), 0o600); err != nil {
		a.t.Fatal(err)
	}
	if err := os.Rename(path+".new", path); err != nil {
		a.t.Fatal(err)
	}
	return path
}

// service starts a webhook and writes a kubeconfig that refers to it.
func (a *access) service(name string, h http.HandlerFunc) string {
	a.t.Helper()
	srv := httptest.NewTLSServer(h)
	a.t.Cleanup(srv.Close)
	conf := clientcmdapi.NewConfig()
	ca := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: srv.Certificate().Raw})
	conf.Clusters["c"] = &clientcmdapi.Cluster{Server: srv.URL, CertificateAuthorityData: ca}
	conf.Contexts["x"] = &clientcmdapi.Context{Cluster: "c"}
	conf.CurrentContext = "x"
	path := filepath.Join(a.folder, name)
	if err := clientcmd.WriteToFile(*conf, path); err != nil {
		a.t.Fatal(err)
	}
	return path
}

// start starts a replica that follows the configuration files.
func (a *access) start() *replica {
	a.t.Helper()
	log := slog.New(slog.DiscardHandler)
	compilers := cel.New()
	authentication, err := authnfile.Load(authnfile.Config{
		Options: a.authn, Compilers: compilers, Audiences: []string{pki.DefaultIssuer}, Disallowed: []string{pki.DefaultIssuer},
		Clock: time.Now, Log: log,
	})
	if err != nil {
		a.t.Fatal(err)
	}
	authorization, err := authzfile.Load(authzfile.Config{Options: a.authz, Compilers: compilers, Clock: time.Now, Log: log})
	if err != nil {
		a.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	r := start(a.t, func(c *Config) { c.Authentication, c.Authorization = authentication, authorization })
	var parts sync.WaitGroup
	parts.Go(func() { _ = authentication.Run(ctx) })
	parts.Go(func() { _ = authorization.Run(ctx) })
	a.t.Cleanup(func() { cancel(); parts.Wait() })
	return r
}

// whoami returns the user as which a request with the token and headers is authenticated.
func whoami(r *replica, token string, headers ...string) (authenticationv1.UserInfo, int) {
	r.t.Helper()
	if token != "" {
		headers = append(headers, "Authorization", "Bearer "+token)
	}
	headers = append(headers, "Content-Type", "application/json")
	a := r.call(r.stranger(), http.MethodPost, "/apis/authentication.k8s.io/v1/selfsubjectreviews",
		`{"apiVersion":"authentication.k8s.io/v1","kind":"SelfSubjectReview"}`, headers...)
	var review authenticationv1.SelfSubjectReview
	if a.code == http.StatusCreated {
		if err := json.Unmarshal([]byte(a.body), &review); err != nil {
			r.t.Fatal(err)
		}
	}
	return review.Status.UserInfo, a.code
}

// becomes waits until a token authenticates a user; "" = no user.
func becomes(t *testing.T, r *replica, token, user string) {
	t.Helper()
	eventually(t, func() error {
		u, code := whoami(r, token)
		if u.Username != user || (user == "") != (code == http.StatusUnauthorized) {
			return fmt.Errorf("the token is %q, %d; want %q", u.Username, code, user)
		}
		return nil
	})
}

const oidcConfig = `
apiVersion: apiserver.config.k8s.io/%s
kind: AuthenticationConfiguration
jwt:
- issuer:
    url: %s
    audiences: [keelson]
    certificateAuthority: |
%s
  claimMappings:
    username:
      expression: '"%s:" + claims.sub'
`

func indented(text string) string {
	return "      " + strings.ReplaceAll(strings.TrimSpace(text), "\n", "\n      ")
}

// F23: issuers of a file authenticate; who is taken out of the file is out, who is put in is in, keys rotate, and a file
// that cannot be read changes nothing.
func TestAuthenticationConfiguration(t *testing.T) {
	one, two := issuertest.New(t), issuertest.New(t)
	say := func(version, prefix string, p *issuertest.Provider) string {
		return fmt.Sprintf(oidcConfig, version, p.URL, indented(p.CA()), prefix)
	}
	a := newAccess(t)
	a.authn.ConfigFile = a.file("authn.yaml", say("v1", "one", one))
	r := a.start()
	becomes(t, r, one.Token(nil), "one:alice")
	if _, code := whoami(r, two.Token(nil)); code != http.StatusUnauthorized {
		t.Errorf("an issuer that no file names: %d", code)
	}
	one.Rotate("next")
	if u, _ := whoami(r, one.Token(nil)); u.Username != "one:alice" {
		t.Errorf("after a rotation: %+v", u)
	}
	a.file("authn.yaml", say("v1beta1", "two", two))
	becomes(t, r, two.Token(nil), "two:alice")
	becomes(t, r, one.Token(nil), "")
	a.file("authn.yaml", "kind: Nonsense")
	a.file("authn.yaml", say("v1", "again", one)+"unknownField: true\n")
	a.file("authn.yaml", say("v1", "again", one))
	becomes(t, r, one.Token(nil), "again:alice")
	becomes(t, r, two.Token(nil), "")
	review, err := r.admin().AuthenticationV1().TokenReviews().Create(within(t), &authenticationv1.TokenReview{
		Spec: authenticationv1.TokenReviewSpec{Token: strings.Repeat("a.", 512<<10)},
	}, metav1.CreateOptions{})
	if err != nil || review.Status.Authenticated || !strings.Contains(review.Status.Error, "bytes") {
		t.Errorf("a review of a token of 1 MiB: %+v, %v", review.Status, err)
	}
	review, err = r.admin().AuthenticationV1().TokenReviews().Create(within(t), &authenticationv1.TokenReview{
		Spec: authenticationv1.TokenReviewSpec{Token: one.Token(nil), Audiences: []string{"vault"}},
	}, metav1.CreateOptions{})
	if err != nil || review.Status.Authenticated {
		t.Errorf("a token of an issuer, reviewed for an audience that is not this API: %+v, %v", review.Status, err)
	}
}

// Static tokens come from a file that is followed; strangers may come only where the configuration says.
func TestStaticTokensAndAnonymous(t *testing.T) {
	a := newAccess(t)
	a.authn.TokenFile = a.file("tokens.csv", "secret-1,bob,17,\"dev,ops\"\n")
	a.authn.ConfigFile = a.file("authn.yaml", `
apiVersion: apiserver.config.k8s.io/v1
kind: AuthenticationConfiguration
anonymous:
  enabled: true
  conditions: [{path: /livez}, {path: /version}]
`)
	r := a.start()
	if u, _ := whoami(r, "secret-1"); u.Username != "bob" || u.UID != "17" || strings.Join(u.Groups, ",") != "dev,ops,system:authenticated" {
		t.Errorf("got %+v", u)
	}
	for path, want := range map[string]int{"/livez": 200, "/version": 200, "/readyz": 401, "/livez/ping": 401, "/api": 401, "/api/v1/pods": 401} {
		if got := r.call(r.stranger(), http.MethodGet, path, ""); got.code != want {
			t.Errorf("a stranger at %s: %d, want %d: %s", path, got.code, want, got.body)
		}
		if got := r.call(r.stranger(), http.MethodGet, path, "", "Authorization", "Bearer secret-1"); got.code == 401 {
			t.Errorf("bob at %s: %d: %s", path, got.code, got.body)
		}
	}
	a.file("tokens.csv", "secret-2,bob,17\n")
	becomes(t, r, "secret-2", "bob")
	becomes(t, r, "secret-1", "")
}

// F24: a service that answers TokenReviews authenticates; it is asked once for what it has answered, and when it cannot
// be asked nobody is let in.
func TestTokenReviewWebhook(t *testing.T) {
	for _, version := range []string{"v1", "v1beta1"} {
		t.Run(version, func(t *testing.T) {
			var asked atomic.Int32
			a := newAccess(t)
			a.authn.WebhookVersion = version
			a.authn.WebhookConfig = a.service("hook", func(w http.ResponseWriter, r *http.Request) {
				asked.Add(1)
				var q authenticationv1.TokenReview
				if err := json.NewDecoder(r.Body).Decode(&q); err != nil || q.APIVersion != "authentication.k8s.io/"+version {
					http.Error(w, "unexpected", http.StatusBadRequest)
					return
				}
				if q.Spec.Token == "broken" {
					http.Error(w, "unexpected", http.StatusBadRequest)
					return
				}
				if q.Spec.Token == "good" {
					q.Status.Authenticated = true
					q.Status.User = authenticationv1.UserInfo{Username: "carol", Groups: []string{"hooked"}, Extra: map[string]authenticationv1.ExtraValue{"k": {"v"}}}
				}
				_ = json.NewEncoder(w).Encode(q)
			})
			r := a.start()
			for range 3 {
				if u, _ := whoami(r, "good"); u.Username != "carol" || u.Groups[0] != "hooked" || u.Extra["k"][0] != "v" {
					t.Errorf("got %+v", u)
				}
				if _, code := whoami(r, "bad"); code != http.StatusUnauthorized {
					t.Errorf("a bad token: %d", code)
				}
			}
			if n := asked.Load(); n == 2 {
				if _, code := whoami(r, "broken"); code != http.StatusUnauthorized {
					t.Errorf("a token about which the service says nothing: %d", code)
				}
				asked.Store(n)
			} else {
				t.Errorf("the service was asked %d times about two tokens", n)
			}
			if u, _ := whoami(r, "alice-token"); u.Username != "alice" || asked.Load() != 2 {
				t.Errorf("a token that another verifier knows: %+v, asked %d times", u, asked.Load())
			}
		})
	}
}

// What a service has said of tokens is remembered when other files change, and not when the way to it does.
func TestAnswersAboutTokensOutliveOtherFiles(t *testing.T) {
	var asked atomic.Int32
	a := newAccess(t)
	a.authn.TokenFile = a.file("tokens.csv", "secret-1,bob,17\n")
	a.authn.WebhookVersion = "v1"
	a.authn.WebhookConfig = a.service("hook", func(w http.ResponseWriter, r *http.Request) {
		var q authenticationv1.TokenReview
		_ = json.NewDecoder(r.Body).Decode(&q)
		if q.Spec.Token == "good" {
			asked.Add(1)
			q.Status.Authenticated, q.Status.User.Username = true, "carol"
		}
		_ = json.NewEncoder(w).Encode(q)
	})
	r := a.start()
	becomes(t, r, "good", "carol")
	a.file("tokens.csv", "secret-2,bob,17\n")
	becomes(t, r, "secret-2", "bob")
	becomes(t, r, "good", "carol")
	if n := asked.Load(); n != 1 {
		t.Errorf("after a change of another file the service was asked %d times about one token", n)
	}
	config, err := os.ReadFile(a.authn.WebhookConfig)
	if err != nil {
		t.Fatal(err)
	}
	a.file("hook", string(config)+"\n")
	eventually(t, func() error {
		becomes(t, r, "good", "carol")
		if n := asked.Load(); n != 2 {
			return fmt.Errorf("after a change of the way to it the service was asked %d times", n)
		}
		return nil
	})
}

// Bootstrap tokens are Secrets, and end with them.
func TestBootstrapTokens(t *testing.T) {
	a := newAccess(t)
	a.authn.BootstrapTokens = true
	r := a.start()
	ctx := within(t)
	secrets := r.admin().CoreV1().Secrets("kube-system")
	put := func(id string, change map[string]string) {
		t.Helper()
		data := map[string]string{"token-id": id, "token-secret": "0123456789abcdef", "usage-bootstrap-authentication": "true"}
		for k, v := range change {
			data[k] = v
		}
		_, err := secrets.Create(ctx, &corev1.Secret{
			ObjectMeta: metav1.ObjectMeta{Name: "bootstrap-token-" + id}, Type: corev1.SecretTypeBootstrapToken, StringData: data,
		}, metav1.CreateOptions{})
		if err != nil {
			t.Fatal(err)
		}
	}
	put("good01", map[string]string{"auth-extra-groups": "system:bootstrappers:workers", "expiration": time.Now().Add(time.Hour).Format(time.RFC3339)})
	put("ended1", map[string]string{"expiration": time.Now().Add(-time.Hour).Format(time.RFC3339)})
	put("badend", map[string]string{"expiration": "tomorrow"})
	put("other1", map[string]string{"usage-bootstrap-authentication": "false"})
	put("groups", map[string]string{"auth-extra-groups": "system:masters"})
	put("swap01", map[string]string{"token-id": "swap02"})
	becomes(t, r, "good01.0123456789abcdef", "system:bootstrap:good01")
	u, _ := whoami(r, "good01.0123456789abcdef")
	if strings.Join(u.Groups, ",") != "system:bootstrappers,system:bootstrappers:workers,system:authenticated" {
		t.Errorf("groups %v", u.Groups)
	}
	for _, id := range []string{"ended1", "badend", "other1", "groups", "swap01", "swap02", "nobody"} {
		if _, code := whoami(r, id+".0123456789abcdef"); code != http.StatusUnauthorized {
			t.Errorf("%s: %d", id, code)
		}
	}
	if _, code := whoami(r, "good01.0123456789abcdee"); code != http.StatusUnauthorized {
		t.Errorf("another secret: %d", code)
	}
	if err := secrets.Delete(ctx, "bootstrap-token-good01", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	becomes(t, r, "good01.0123456789abcdef", "")
}

// A proxy with a certificate of its own authority is believed; headers of anybody else mean nothing.
func TestAuthenticatingProxy(t *testing.T) {
	proxies, err := pki.NewTrust("proxies", time.Now())
	if err != nil {
		t.Fatal(err)
	}
	a := newAccess(t)
	h := &a.authn.RequestHeader
	h.ClientCAFile, h.AllowedNames = a.file("proxy-ca.pem", string(proxies.CA.PEM())), []string{"front"}
	h.UsernameHeaders, h.GroupHeaders, h.ExtraPrefixes, h.UIDHeaders = []string{"X-Remote-User"}, []string{"X-Remote-Group"}, []string{"X-Remote-Extra-"}, []string{"X-Remote-Uid"}
	r := a.start()
	as := func(trust *pki.Trust, name string) (authenticationv1.UserInfo, int) {
		t.Helper()
		issued, err := trust.CA.Issue(pki.Client(name), time.Now())
		if err != nil {
			t.Fatal(err)
		}
		got := r.call(r.http(&issued.TLS), http.MethodPost, "/apis/authentication.k8s.io/v1/selfsubjectreviews",
			`{"apiVersion":"authentication.k8s.io/v1","kind":"SelfSubjectReview"}`, "Content-Type", "application/json",
			"X-Remote-User", "dave", "X-Remote-Group", "a", "X-Remote-Group", "b", "X-Remote-Extra-Example.org%2fk", "v", "X-Remote-Uid", "9")
		var review authenticationv1.SelfSubjectReview
		_ = json.Unmarshal([]byte(got.body), &review)
		return review.Status.UserInfo, got.code
	}
	u, _ := as(proxies, "front")
	if u.Username != "dave" || u.UID != "9" || strings.Join(u.Groups, ",") != "a,b,system:authenticated" || u.Extra["example.org/k"][0] != "v" {
		t.Errorf("got %+v", u)
	}
	if u, code := as(proxies, "back"); code != http.StatusUnauthorized {
		t.Errorf("a proxy of another name: %+v, %d", u, code)
	}
	if u, _ := as(r.trust, "front"); u.Username != "front" {
		t.Errorf("a user of that name with headers is %+v", u)
	}
}

// F33: authorizers are asked in the order of the file: a webhook that is matched decides before RBAC, its failure as the
// file says, and a changed file takes effect.
func TestAuthorizationConfiguration(t *testing.T) {
	var asked atomic.Int32
	var broken atomic.Bool
	a := newAccess(t)
	hook := a.service("hook", func(w http.ResponseWriter, r *http.Request) {
		asked.Add(1)
		var q authorizationv1.SubjectAccessReview
		if err := json.NewDecoder(r.Body).Decode(&q); err != nil || broken.Load() || q.Spec.ResourceAttributes == nil {
			http.Error(w, "unexpected", http.StatusBadRequest)
			return
		}
		res := q.Spec.ResourceAttributes
		q.Status.Allowed = res.Resource == "configmaps"
		q.Status.Denied = res.Resource == "secrets"
		q.Status.Reason = "says the service"
		_ = json.NewEncoder(w).Encode(q)
	})
	say := func(policy string) string {
		return fmt.Sprintf(`
apiVersion: apiserver.config.k8s.io/v1
kind: AuthorizationConfiguration
authorizers:
- type: Webhook
  name: outside
  webhook:
    timeout: 3s
    subjectAccessReviewVersion: v1
    matchConditionSubjectAccessReviewVersion: v1
    failurePolicy: %s
    connectionInfo: {type: KubeConfigFile, kubeConfigFile: %s}
    matchConditions:
    - expression: has(request.resourceAttributes)
    - expression: "'dev-team' in request.groups"
- {type: Node, name: node}
- {type: RBAC, name: rbac}
`, policy, hook)
	}
	a.authz.ConfigFile = a.file("authz.yaml", say("NoOpinion"))
	r := a.start()
	get := func(path string) answer {
		t.Helper()
		return r.call(r.stranger(), http.MethodGet, path, "", "Authorization", "Bearer alice-token")
	}
	expect := func(path string, code int, words string) {
		t.Helper()
		if got := get(path); got.code != code || !strings.Contains(got.body, words) {
			t.Errorf("%s: %d %s, want %d with %q", path, got.code, got.body, code, words)
		}
	}
	expect("/api/v1/namespaces/default/configmaps", 200, "")
	expect("/api/v1/namespaces/default/secrets", 403, "says the service")
	expect("/version", 200, "") // by RBAC: the service is for resources
	before := asked.Load()
	expect("/api/v1/namespaces/default/configmaps", 200, "")
	if asked.Load() != before || before != 2 {
		t.Errorf("asked %d times, then %d", before, asked.Load())
	}
	if _, err := r.admin().CoreV1().Secrets("default").List(within(t), metav1.ListOptions{}); err != nil || asked.Load() != before {
		t.Errorf("an administrator: %v; the service was asked %d times", err, asked.Load())
	}
	rules, err := r.client("alice").AuthorizationV1().SelfSubjectRulesReviews().Create(within(t), &authorizationv1.SelfSubjectRulesReview{
		Spec: authorizationv1.SelfSubjectRulesReviewSpec{Namespace: "default"},
	}, metav1.CreateOptions{})
	if err != nil || !rules.Status.Incomplete || !strings.Contains(rules.Status.EvaluationError, "webhook") {
		t.Errorf("a list of rules: %+v, %v", rules, err)
	}
	broken.Store(true)
	expect("/api/v1/namespaces/default/services", 403, "webhook outside")
	a.file("authz.yaml", say("Deny"))
	eventually(t, func() error { // what is remembered goes with the former configuration
		if got := get("/api/v1/namespaces/default/configmaps"); got.code != 403 {
			return fmt.Errorf("%d: %s", got.code, got.body)
		}
		return nil
	})
	a.file("authz.yaml", strings.ReplaceAll(say("Deny"), "has(request", "hasnt(request"))
	a.file("authz.yaml", `
apiVersion: apiserver.config.k8s.io/v1beta1
kind: AuthorizationConfiguration
authorizers: [{type: AlwaysAllow, name: all}]
`)
	eventually(t, func() error {
		if got := get("/api/v1/namespaces/default/secrets"); got.code != 200 {
			return fmt.Errorf("%d: %s", got.code, got.body)
		}
		return nil
	})
}

// F31: a policy file allows what its lines allow.
func TestABACMode(t *testing.T) {
	a := newAccess(t)
	a.authz.Modes = []string{"Node", "ABAC"}
	a.authz.PolicyFile = a.file("policy.jsonl", `# who may what
{"apiVersion":"abac.authorization.kubernetes.io/v1beta1","kind":"Policy","spec":{"group":"dev-team","namespace":"default","resource":"*","apiGroup":"*","readonly":true}}
`)
	r := a.start()
	for path, want := range map[string]int{"/api/v1/namespaces/default/secrets": 200, "/api/v1/secrets": 403, "/version": 403} {
		if got := r.call(r.stranger(), http.MethodGet, path, "", "Authorization", "Bearer alice-token"); got.code != want {
			t.Errorf("%s: %d, want %d", path, got.code, want)
		}
	}
	if got := r.call(r.stranger(), http.MethodDelete, "/api/v1/namespaces/default/secrets/x", "", "Authorization", "Bearer alice-token"); got.code != 403 {
		t.Errorf("a delete: %d", got.code)
	}
}
