// Package conformance asks one API server, kind by kind, for all that Kubernetes documents of stored and of virtual
// kinds. A kind needs no more than a row: testdata/kinds/GROUP/VERSION/KIND.yaml, with an object that is valid and what
// is particular to the kind. A kind without a row fails, and so does a row without a kind.
package conformance

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	metricsv1beta1 "k8s.io/metrics/pkg/apis/metrics/v1beta1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/custom"
	"keelson.dev/keelson/controlplane/api/kinds"
	"keelson.dev/keelson/controlplane/api/kinds/networking"
	"keelson.dev/keelson/controlplane/apiserver"
	"keelson.dev/keelson/controlplane/apiserver/cel"
	"keelson.dev/keelson/controlplane/pki"
	"keelson.dev/keelson/controlplane/registry"
	"keelson.dev/keelson/raftstore/storetest"
)

// server is one API server over a store in memory, which serves TLS on loopback, and its administrator.
type server struct {
	kinds  *api.Kinds
	scheme *runtime.Scheme
	url    string
	client *http.Client
}

// shared serves all tests of the package: each kind keeps to objects of its own.
var shared *server

func TestMain(m *testing.M) {
	ctx, cancel := context.WithCancel(context.Background())
	s, done, err := serve(ctx)
	code := 1
	if err == nil {
		shared = s
		code = m.Run()
		cancel()
		err = done()
	}
	cancel()
	if err != nil {
		fmt.Fprintln(os.Stderr, "the server:", err)
		code = 1
	}
	os.Exit(code)
}

// widgets are a kind that is registered while the server runs, without a Go type.
var widgets = custom.Resource{
	Group: "conformance.example.com", Kind: "Widget", Plural: "widgets", Singular: "widget", Namespaced: true,
}

// components are what the server tells of the parts of a cluster that is well.
func components(context.Context) (all []corev1.ComponentStatus) {
	for _, name := range []string{"controller-manager", "etcd-0", "scheduler"} {
		healthy := corev1.ComponentCondition{Type: corev1.ComponentHealthy, Status: corev1.ConditionTrue, Message: "ok"}
		all = append(all, corev1.ComponentStatus{ObjectMeta: metav1.ObjectMeta{Name: name},
			Conditions: []corev1.ComponentCondition{healthy}})
	}
	return all
}

// kindOf finds a kind of the core.
func (s *server) kindOf(t *testing.T, resource string) *api.Kind {
	t.Helper()
	k := s.kinds.ByResource(corev1.SchemeGroupVersion.WithResource(resource))
	if k == nil {
		t.Fatalf("no %s are served", resource)
	}
	return k
}

// usage is known of Nodes and pods that are labelled told.
func usage(of []api.Object) (out []api.Object) {
	use := corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("250m"),
		corev1.ResourceMemory: resource.MustParse("32Mi")}
	for _, o := range of {
		meta := metav1.ObjectMeta{Namespace: o.GetNamespace(), Name: o.GetName()}
		switch _, isNode := o.(*corev1.Node); {
		case o.GetLabels()["told"] == "":
		case isNode:
			out = append(out, &metricsv1beta1.NodeMetrics{ObjectMeta: meta,
				Window: metav1.Duration{Duration: 15 * time.Second}, Usage: use})
		default:
			out = append(out,
				&metricsv1beta1.PodMetrics{ObjectMeta: meta, Window: metav1.Duration{Duration: 15 * time.Second},
					Containers: []metricsv1beta1.ContainerMetrics{{Name: "c", Usage: use}}})
		}
	}
	return out
}

// patience is for an answer, and for all that a watch is to tell, of a machine that does much else.
const patience = 5 * time.Minute

// serve starts a server; done waits until it has ended, after ctx has.
func serve(ctx context.Context) (s *server, done func() error, err error) {
	trust, err := pki.NewTrust("test", time.Now())
	if err != nil {
		return nil, nil, err
	}
	tokens, err := pki.NewServiceTokens(pki.DefaultIssuer, trust.ServiceKey)
	if err != nil {
		return nil, nil, err
	}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, nil, err
	}
	admin, err := trust.CA.Issue(pki.Client("admin", api.GroupMasters), time.Now())
	if err != nil {
		return nil, nil, err
	}
	compilers := cel.New()
	s = &server{kinds: kinds.All(kinds.WithCompiler(compilers.Admission().Judge)), scheme: api.Scheme(),
		url: "https://" + ln.Addr().String()}
	conf := &tls.Config{RootCAs: trust.Pool(), Certificates: []tls.Certificate{admin.TLS}}
	s.client = &http.Client{Timeout: patience,
		Transport: &http.Transport{TLSClientConfig: conf, ForceAttemptHTTP2: true}}

	quiet := slog.New(slog.NewTextHandler(io.Discard, nil))
	store := storetest.NewMemory()
	reg := registry.New(store, s.kinds, registry.WithScheme(s.scheme), registry.WithLog(quiet),
		registry.WithCompanions(&corev1.Service{}, networking.ServiceCompanions))
	serving := trust.CA.Rotator(pki.ReplicaServing("test", net.ParseIP("10.96.0.1"), "127.0.0.1"), time.Now)
	front := apiserver.New(apiserver.Config{
		Name: "test", Registry: reg, Kinds: s.kinds, Scheme: s.scheme, Log: quiet,
		Serving: apiserver.ServingConfig{Listener: ln, TLS: pki.ServerTLS(trust.Pool(), serving, time.Now),
			ShutdownDeadline: 100 * time.Millisecond},
		Authentication: apiserver.AuthenticationConfig{ClientCAs: trust.Pool, ServiceTokens: tokens},
		Admission:      apiserver.AdmissionConfig{Expressions: compilers},
		State:          apiserver.StateConfig{Components: components, Usage: usage},
	})
	ended := make(chan error, 2)
	go func() { ended <- reg.Run(ctx) }()
	go func() { ended <- front.Run(ctx) }()
	done = func() error {
		s.client.CloseIdleConnections()
		err := errors.Join(<-ended, <-ended)
		store.Close()
		if errors.Is(err, context.Canceled) {
			return nil
		}
		return err
	}
	boot, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	if err := front.Bootstrap().EnsureBootstrap(boot, 0); err != nil {
		return nil, nil, err
	}
	select {
	case <-front.Ready():
	case <-boot.Done():
		return nil, nil, boot.Err()
	}
	return s, done, s.kinds.Register(custom.NewKind(widgets, "v1", true, custom.NewStorage(widgets, "v1")))
}

// answer is an HTTP answer, read.
type answer struct {
	code   int
	header http.Header
	body   []byte
}

// object reads the answer as a JSON object; one that is none is nil.
func (a answer) object() object {
	var o object
	if json.Unmarshal(a.body, &o) != nil {
		return nil
	}
	return o
}

// The media types of bodies.
const (
	asJSON      = "application/json"
	jsonPatch   = "application/json-patch+json"
	mergePatch  = "application/merge-patch+json"
	strategic   = "application/strategic-merge-patch+json"
	applyPatch  = "application/apply-patch+yaml"
	protobuf    = "application/vnd.kubernetes.protobuf"
	asTable     = "application/json;as=Table;v=v1;g=meta.k8s.io"
	asPartial   = "application/json;as=PartialObjectMetadata;v=v1;g=meta.k8s.io"
	asPartials  = "application/json;as=PartialObjectMetadataList;v=v1;g=meta.k8s.io"
	contentType = "Content-Type"
)

// send asks as the administrator. body is a string or what is written as JSON; nil is none.
func (s *server) send(t *testing.T, method, path string, body any, headers ...string) answer {
	t.Helper()
	text, isText := body.(string)
	if !isText && body != nil {
		data, err := json.Marshal(body)
		if err != nil {
			t.Fatal(err)
		}
		text = string(data)
	}
	req, err := http.NewRequestWithContext(t.Context(), method, s.url+path, strings.NewReader(text))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set(contentType, asJSON)
	for i := 0; i+1 < len(headers); i += 2 {
		req.Header.Set(headers[i], headers[i+1])
	}
	resp, err := s.client.Do(req)
	if err != nil {
		t.Fatalf("%s %s: %v", method, path, err)
	}
	defer resp.Body.Close()
	data, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatalf("%s %s: %v", method, path, err)
	}
	return answer{resp.StatusCode, resp.Header, data}
}

// want sends and fails unless the answer has the code.
func (s *server) want(t *testing.T, code int, method, path string, body any, headers ...string) answer {
	t.Helper()
	a := s.send(t, method, path, body, headers...)
	if a.code != code {
		t.Fatalf("%s %s: %d, want %d: %.800s", method, path, a.code, code, a.body)
	}
	return a
}
