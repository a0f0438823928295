package webhooks

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"encoding/pem"
	"log/slog"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	admissionv1 "k8s.io/api/admission/v1"
	arv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/kinds"
	"keelson.dev/keelson/controlplane/apiserver/admission/matching"
	"keelson.dev/keelson/controlplane/apiserver/cel"
)

// authority is the CA of the servers of one test.
type authority struct {
	key  *ecdsa.PrivateKey
	cert *x509.Certificate
	pem  []byte
}

func newAuthority(t testing.TB) *authority {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	a := &authority{key: key}
	a.cert, a.pem = a.sign(t, &x509.Certificate{
		Subject: pkix.Name{CommonName: "ca"}, IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}, &key.PublicKey)
	return a
}

func (a *authority) sign(t testing.TB, c *x509.Certificate, to *ecdsa.PublicKey) (*x509.Certificate, []byte) {
	t.Helper()
	c.SerialNumber, c.NotBefore, c.NotAfter = big.NewInt(1), time.Now().Add(-time.Hour), time.Now().Add(time.Hour)
	parent := a.cert
	if parent == nil {
		parent = c
	}
	der, err := x509.CreateCertificate(rand.Reader, c, parent, to, a.key)
	if err != nil {
		t.Fatal(err)
	}
	out, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	return out, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
}

// server starts a webhook on the loopback interface with a certificate for webhook.hooks.svc.
func (a *authority) server(t testing.TB, h http.HandlerFunc) *httptest.Server {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	cert, _ := a.sign(t, &x509.Certificate{
		Subject: pkix.Name{CommonName: "webhook"}, DNSNames: []string{"webhook.hooks.svc"},
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
	}, &key.PublicKey)
	s := httptest.NewUnstartedServer(h)
	s.TLS = &tls.Config{Certificates: []tls.Certificate{{Certificate: [][]byte{cert.Raw}, PrivateKey: key}}}
	s.Config.ErrorLog = slog.NewLogLogger(slog.DiscardHandler, slog.LevelDebug)
	s.StartTLS()
	t.Cleanup(s.Close)
	return s
}

// answering returns a webhook handler that decodes the request and sends the response of say.
func answering(
	t testing.TB, say func(r *admissionv1.AdmissionRequest, out *admissionv1.AdmissionResponse),
) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		var review admissionv1.AdmissionReview
		if err := json.NewDecoder(r.Body).Decode(&review); err != nil {
			t.Errorf("the question is no AdmissionReview: %v", err)
			return
		}
		out := &admissionv1.AdmissionResponse{UID: review.Request.UID, Allowed: true}
		say(review.Request, out)
		review.Request, review.Response = nil, out
		_ = json.NewEncoder(w).Encode(&review)
	}
}

// says returns a webhook handler that sends the same response to every request.
func says(t testing.TB, out admissionv1.AdmissionResponse) http.HandlerFunc {
	return answering(t, func(_ *admissionv1.AdmissionRequest, o *admissionv1.AdmissionResponse) {
		uid := o.UID
		*o = out
		o.UID = uid
	})
}

func patching(t testing.TB, patch string) http.HandlerFunc {
	kind := admissionv1.PatchTypeJSONPatch
	return says(t, admissionv1.AdmissionResponse{Allowed: true, Patch: []byte(patch), PatchType: &kind})
}

// cluster contains the namespaces of a test.
type cluster map[string]map[string]string

func (c cluster) Get(_ context.Context, resource, _, name string) (api.Object, bool) {
	labels, ok := c[name]
	if resource != "namespaces" || !ok {
		return nil, false
	}
	return &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: labels}}, true
}

// dialer connects all Services to one address.
type dialer struct {
	mu   sync.Mutex
	to   string
	seen []string
}

func (d *dialer) ForService(namespace, name string, _ int32) func(context.Context, string, string) (net.Conn, error) {
	return func(ctx context.Context, _, _ string) (net.Conn, error) {
		d.mu.Lock()
		d.seen = append(d.seen, namespace+"/"+name)
		to := d.to
		d.mu.Unlock()
		return (&net.Dialer{}).DialContext(ctx, "tcp", to)
	}
}

func newWebhooks(t testing.TB, change ...func(*Config)) *Webhooks {
	t.Helper()
	c := Config{
		Versions: matching.Versions{Kinds: kinds.All()}, Cluster: cluster{"default": nil, "hooks": nil},
		Expressions: cel.New().Admission(), Metrics: prometheus.NewRegistry(),
		Log: slog.New(slog.DiscardHandler),
	}
	for _, f := range change {
		f(&c)
	}
	return New(c)
}

// hookAt returns a webhook for all resources at a URL.
func hookAt(name, url string, ca []byte) arv1.ValidatingWebhook {
	return arv1.ValidatingWebhook{
		Name: name, ClientConfig: arv1.WebhookClientConfig{URL: &url, CABundle: ca},
		Rules: []arv1.RuleWithOperations{{
			Operations: []arv1.OperationType{arv1.OperationAll},
			Rule:       arv1.Rule{APIGroups: []string{"*"}, APIVersions: []string{"*"}, Resources: []string{"*/*"}},
		}},
		FailurePolicy: new(arv1.Fail), SideEffects: new(arv1.SideEffectClassNone),
		AdmissionReviewVersions: []string{"v1"}, TimeoutSeconds: new(int32(10)),
	}
}

func validating(name string, hooks ...arv1.ValidatingWebhook) *arv1.ValidatingWebhookConfiguration {
	return &arv1.ValidatingWebhookConfiguration{ObjectMeta: metav1.ObjectMeta{Name: name}, Webhooks: hooks}
}

// mutating returns a MutatingWebhookConfiguration with the given webhooks; again lists the names
// with the reinvocation policy IfNeeded.
func mutating(name string, hooks []arv1.ValidatingWebhook, again ...string) *arv1.MutatingWebhookConfiguration {
	out := &arv1.MutatingWebhookConfiguration{ObjectMeta: metav1.ObjectMeta{Name: name}}
	for _, h := range hooks {
		m := arv1.MutatingWebhook{
			Name: h.Name, ClientConfig: h.ClientConfig, Rules: h.Rules, FailurePolicy: h.FailurePolicy,
			MatchPolicy: h.MatchPolicy, NamespaceSelector: h.NamespaceSelector, ObjectSelector: h.ObjectSelector,
			SideEffects: h.SideEffects, TimeoutSeconds: h.TimeoutSeconds,
			AdmissionReviewVersions: h.AdmissionReviewVersions, MatchConditions: h.MatchConditions,
		}
		for _, n := range again {
			if n == h.Name {
				m.ReinvocationPolicy = new(arv1.IfNeededReinvocationPolicy)
			}
		}
		out.Webhooks = append(out.Webhooks, m)
	}
	return out
}

// podAttempt returns the creation of a pod.
func podAttempt() *matching.Attempt {
	return &matching.Attempt{
		User: api.User{Name: "jane", UID: "7", Groups: []string{"dev"},
			Extra: map[string][]string{"scopes": {"a"}}},
		Operation: api.Create, Kind: schema.GroupVersionKind{Version: "v1", Kind: "Pod"},
		Resource: schema.GroupVersionResource{Version: "v1", Resource: "pods"}, Namespace: "default", Name: "p",
		Object: &corev1.Pod{
			TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Pod"},
			ObjectMeta: metav1.ObjectMeta{Name: "p", Namespace: "default", UID: "u", Generation: 1,
				Labels: map[string]string{"app": "x"}},
			Spec:   corev1.PodSpec{Containers: []corev1.Container{{Name: "c", Image: "i"}}},
			Status: corev1.PodStatus{Phase: corev1.PodPending},
		},
		Options: &metav1.CreateOptions{TypeMeta: metav1.TypeMeta{APIVersion: "meta.k8s.io/v1", Kind: "CreateOptions"}},
	}
}

// notes collects audit annotations.
type notes struct {
	mu   sync.Mutex
	said map[string]string
}

func (n *notes) Annotate(key, value string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.said == nil {
		n.said = map[string]string{}
	}
	n.said[key] = value
}

func (n *notes) AnnotateContent(key, value string) { n.Annotate(key, value) }

// heard returns a context that collects warnings and audit annotations.
func heard(t testing.TB) (context.Context, *notes, func() []string) {
	n := &notes{}
	ctx, warnings := api.WithWarnings(api.WithAnnotator(t.Context(), n))
	return ctx, n, warnings
}

// counted returns the sum of a webhook counter over the series with all of the given label values.
func counted(t testing.TB, w *Webhooks, name string, labels ...string) (sum float64) {
	t.Helper()
	families, err := w.cfg.Metrics.(*prometheus.Registry).Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		if f.GetName() != "apiserver_admission_webhook_"+name {
			continue
		}
		for _, m := range f.GetMetric() {
			var have []string
			for _, l := range m.GetLabel() {
				have = append(have, l.GetValue())
			}
			if !slices.ContainsFunc(labels, func(l string) bool { return !slices.Contains(have, l) }) {
				sum += m.GetCounter().GetValue()
			}
		}
	}
	return sum
}
