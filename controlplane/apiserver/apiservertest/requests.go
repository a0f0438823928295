package apiservertest

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"io"
	"net"
	"net/http"
	"reflect"
	"strings"
	"sync"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer/cbor/direct"
	"k8s.io/client-go/dynamic"
	clientfeatures "k8s.io/client-go/features"
	clientfeaturestesting "k8s.io/client-go/features/testing"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/yaml"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/apiserver/admission"
)

// Answered sends a request. It fails the test if the response is a server error or does not arrive
// within 15 seconds.
func (r *Replica) Answered(t *testing.T, c *http.Client, method, path, body string, headers ...string) {
	t.Helper()
	req, err := http.NewRequest(method, "https://"+r.Addr+path, strings.NewReader(body))
	if err != nil {
		return // no client could send it
	}
	for i := 0; i+1 < len(headers); i += 2 {
		req.Header.Set(headers[i], headers[i+1])
	}
	began := time.Now()
	resp, err := c.Do(req)
	if err != nil {
		if strings.Contains(err.Error(), "net/http: invalid") {
			return
		}
		t.Fatalf("%s %q: %v", method, path, err)
	}
	resp.Body.Close()
	if took := time.Since(began); resp.StatusCode >= 500 || took > 15*time.Second {
		t.Errorf("%s %q with %q and %q: %d after %v", method, path, headers, body, resp.StatusCode, took)
	}
}

// Plain decodes a response body of the media type media (JSON, YAML or CBOR) to JSON values.
func Plain(t *testing.T, media string, body []byte) any {
	t.Helper()
	var v any
	var err error
	switch {
	case strings.HasPrefix(media, "application/cbor"):
		err = direct.Unmarshal(body, &v)
		if err == nil {
			body, err = json.Marshal(v)
		}
	case strings.HasPrefix(media, "application/yaml"):
		body, err = yaml.YAMLToJSON(body)
	}
	if err == nil {
		v = nil
		err = json.Unmarshal(body, &v)
	}
	if err != nil {
		t.Fatalf("%s: %v in %.300q", media, err, body)
	}
	return v
}

// Spoken is an http.RoundTripper that counts the media types of requests and responses in Seen.
type Spoken struct {
	Mu   sync.Mutex
	Seen map[string]int
	Next http.RoundTripper
}

// RoundTrip records the media types and sends the request. It implements http.RoundTripper.
func (s *Spoken) RoundTrip(r *http.Request) (*http.Response, error) {
	resp, err := s.Next.RoundTrip(r)
	s.Mu.Lock()
	defer s.Mu.Unlock()
	if media := r.Header.Get("Content-Type"); media != "" {
		s.Seen["> "+media]++
	}
	if err == nil {
		s.Seen["< "+resp.Header.Get("Content-Type")]++
	}
	return resp, err
}

// CborConfig returns the configuration of a client that prefers CBOR, and a Spoken that records the
// media types that the client uses.
func (r *Replica) CborConfig(t *testing.T) (*rest.Config, *Spoken) {
	clientfeaturestesting.SetFeatureDuringTest(t, clientfeatures.ClientsAllowCBOR, true)
	clientfeaturestesting.SetFeatureDuringTest(t, clientfeatures.ClientsPreferCBOR, true)
	conf, s := r.ClientConfig("admin", api.GroupMasters), &Spoken{Seen: map[string]int{}}
	conf.ContentType, conf.AcceptContentTypes = "application/cbor", "application/cbor"
	conf.Wrap(func(next http.RoundTripper) http.RoundTripper { s.Next = next; return s })
	return conf, s
}

// GadgetsIn creates, lists and reads a Gadget through the dynamic and metadata clients. It fails
// the test if a result is wrong.
func (r *Replica) GadgetsIn(t *testing.T, conf *rest.Config) {
	t.Helper()
	ctx := Within(t)
	d, err := dynamic.NewForConfig(conf)
	if err != nil {
		t.Fatal(err)
	}
	kind := GadgetKind()
	all := d.Resource(kind.GVR()).Namespace("default")
	spec := map[string]any{"size": int64(9007199254740993), "ratio": 2.5, "list": []any{true, nil, "é"}}
	u := &unstructured.Unstructured{Object: map[string]any{"apiVersion": "example.com/v1", "kind": "Gadget",
		"metadata": map[string]any{"name": "g"}, "spec": spec}}
	made, err := all.Create(ctx, u, metav1.CreateOptions{})
	if err != nil || !reflect.DeepEqual(made.Object["spec"], spec) {
		t.Fatalf("%v %v", made, err)
	}
	list, err := all.List(ctx, metav1.ListOptions{})
	if err != nil || len(list.Items) != 1 || !reflect.DeepEqual(list.Items[0].Object["spec"], spec) {
		t.Errorf("%v %v", list, err)
	}
	m, err := metadata.NewForConfig(conf)
	if err != nil {
		t.Fatal(err)
	}
	if p, err := m.Resource(kind.GVR()).Namespace("default").Get(ctx, "g", metav1.GetOptions{}); err != nil ||
		p.UID != made.GetUID() {
		t.Errorf("%v %v", p, err)
	}
}

// Series returns the metrics of /metrics that have labels: the value by name and labels.
func (r *Replica) Series(c *http.Client) map[string]string {
	r.TB.Helper()
	out := map[string]string{}
	for line := range strings.Lines(r.Call(c, "GET", "/metrics", "").Body) {
		if name, value, ok := strings.Cut(strings.TrimSpace(line), "} "); ok && !strings.HasPrefix(line, "#") {
			out[name+"}"] = value
		}
	}
	return out
}

// Far is the deadline of connections that Raw opens.
const Far = time.Minute

// Raw opens an HTTP/1.1 connection with TLS and without a client certificate. Its deadline is Far.
func (r *Replica) Raw() *tls.Conn {
	r.TB.Helper()
	c, err := tls.Dial("tcp", r.Addr, &tls.Config{RootCAs: r.Trust.Pool(), ServerName: "127.0.0.1",
		NextProtos: []string{"http/1.1"}})
	if err != nil {
		r.TB.Fatal(err)
	}
	r.TB.Cleanup(func() { c.Close() })
	if err := c.SetDeadline(time.Now().Add(Far)); err != nil {
		r.TB.Fatal(err)
	}
	return c
}

// Names returns the items of the list in a response as "NAMESPACE/NAME" or "NAME", separated by
// spaces.
func (a Response) Names(t *testing.T) string {
	t.Helper()
	var list metav1.PartialObjectMetadataList
	if err := json.Unmarshal([]byte(a.Body), &list); err != nil || !strings.HasSuffix(list.Kind, "List") {
		t.Fatalf("not a list: %v: %s", err, a.Body)
	}
	var out []string
	for _, o := range list.Items {
		out = append(out, strings.TrimPrefix(o.Namespace+"/"+o.Name, "/"))
	}
	return strings.Join(out, " ")
}

// RequireKinds returns an admission phase that fails the test if an object of an attempt has no
// apiVersion or kind. Every Replica has this phase.
func RequireKinds(t testing.TB) admission.Phase {
	check := func(a *api.Attempt, name string, o runtime.Object) {
		if o == nil {
			return
		}
		if gvk := o.GetObjectKind().GroupVersionKind(); gvk.Version == "" || gvk.Kind == "" {
			t.Errorf("%s %s/%s by %s: the %s of admission is a %T without apiVersion and kind", a.Operation,
				a.Kind.Resource, a.Facet, a.User.Name, name, o)
		}
	}
	return admission.Phase{Name: "kinds",
		Plugins: []admission.Plugin{{Name: "kinds", Admit: func(_ context.Context, a *api.Attempt) error {
			check(a, "object", a.Object)
			check(a, "old object", a.OldObject)
			return nil
		}}}}
}

// AwaitClosed waits until the peer closes c. It fails the test if the deadline of c, which the
// caller sets to Far, expires first. subject is the name of the connection in the failure message.
func AwaitClosed(t *testing.T, subject string, c net.Conn) {
	t.Helper()
	_, err := io.Copy(io.Discard, c)
	var late net.Error
	if errors.As(err, &late) && late.Timeout() {
		t.Errorf("%s: the connection is still there after %s", subject, Far)
	}
}
