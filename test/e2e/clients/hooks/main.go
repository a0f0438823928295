// Hooks is an admission webhook as in production: it runs in pods behind a Service, with a
// certificate from a Secret that may change at run time. Its paths select its behavior:
//
//	/inject       adds a sidecar, an init container and a volume to pods, as a service mesh does
//	/constraints  validates pods by the constraints in the cluster, as a policy engine does
//	/together     allows requests when four are in progress at the same time, with a warning; it denies a request that stays alone
//	/deny         denies
//	/tamper       allows, with a patch, although the webhook is validating
//	/allow        allows
package main

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"net/http"
	"os"
	"os/signal"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"
)

// review is an AdmissionReview of admission.k8s.io/v1 with the fields that the webhook uses.
type review struct {
	APIVersion string    `json:"apiVersion"`
	Kind       string    `json:"kind"`
	Request    *request  `json:"request,omitempty"`
	Response   *response `json:"response,omitempty"`
}

type request struct {
	UID       string `json:"uid"`
	Operation string `json:"operation"`
	Object    *pod   `json:"object"`
}

type pod struct {
	Metadata struct {
		Labels map[string]string `json:"labels"`
	} `json:"metadata"`
	Spec struct {
		InitContainers []container `json:"initContainers"`
		Containers     []container `json:"containers"`
		Volumes        []any       `json:"volumes"`
	} `json:"spec"`
}

type container struct {
	Name      string `json:"name"`
	Resources struct {
		Limits map[string]any `json:"limits"`
	} `json:"resources"`
}

type response struct {
	UID              string            `json:"uid"`
	Allowed          bool              `json:"allowed"`
	Status           *status           `json:"status,omitempty"`
	Patch            []byte            `json:"patch,omitempty"`
	PatchType        string            `json:"patchType,omitempty"`
	Warnings         []string          `json:"warnings,omitempty"`
	AuditAnnotations map[string]string `json:"auditAnnotations,omitempty"`
}

type status struct {
	Code    int    `json:"code"`
	Reason  string `json:"reason"`
	Message string `json:"message"`
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	mux := http.NewServeMux()
	for path, judge := range map[string]func(context.Context, *request, *response) error{
		"/inject": injectSidecar, "/constraints": checkConstraints, "/tamper": tamperLabels,
		"/together": (&requestBarrier{}).waitForOthers,
		"/deny": func(_ context.Context, _ *request, a *response) error {
			a.Allowed, a.Status = false, &status{http.StatusForbidden, "Forbidden", "never"}
			return nil
		},
		"/allow": func(context.Context, *request, *response) error { return nil },
	} {
		mux.HandleFunc("POST "+path, func(w http.ResponseWriter, r *http.Request) { serveReview(w, r, judge) })
	}
	mux.HandleFunc("GET /readyz", func(http.ResponseWriter, *http.Request) {})
	srv := &http.Server{Addr: ":8443", Handler: mux, ReadHeaderTimeout: 10 * time.Second, TLSConfig: &tls.Config{
		MinVersion: tls.VersionTLS12,
		GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) { // the Secret may have changed
			c, err := tls.LoadX509KeyPair("/certs/tls.crt", "/certs/tls.key")
			return &c, err
		},
	}}
	go func() {
		<-ctx.Done()
		last, cancel := context.WithTimeout(context.Background(), 3*time.Second)
		defer cancel()
		_ = srv.Shutdown(last)
	}()
	if err := srv.ListenAndServeTLS("", ""); !errors.Is(err, http.ErrServerClosed) {
		log.Fatal(err)
	}
}

// requestBarrier makes requests wait for each other until four are in progress.
type requestBarrier struct {
	mu      sync.Mutex
	waiting int
	full    chan struct{} // closed when the group is complete
}

// waitForOthers waits until three other requests are in progress, and then allows the request. It
// denies the request after a limit that is shorter than the timeout of the API server.
func (p *requestBarrier) waitForOthers(ctx context.Context, _ *request, a *response) error {
	p.mu.Lock()
	if p.waiting == 0 {
		p.full = make(chan struct{})
	}
	full := p.full
	if p.waiting++; p.waiting == 4 {
		close(full)
		p.waiting = 0
	}
	p.mu.Unlock()
	alone := time.NewTimer(20 * time.Second)
	defer alone.Stop()
	select {
	case <-full:
		a.Warnings = append(a.Warnings, "asked with three others")
		return nil
	case <-alone.C:
	case <-ctx.Done():
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	select {
	case <-full: // completed after the timeout
		return nil
	default:
	}
	p.waiting--
	a.Allowed, a.Status = false, &status{http.StatusForbidden, "Forbidden", "no other webhook was called meanwhile"}
	return nil
}

// serveReview decodes an AdmissionReview, calls review to fill in the response, and sends the
// response.
func serveReview(w http.ResponseWriter, r *http.Request, judge func(context.Context, *request, *response) error) {
	var q review
	if err := json.NewDecoder(http.MaxBytesReader(w, r.Body, 8<<20)).Decode(&q); err != nil || q.Request == nil {
		http.Error(w, fmt.Sprint("not a review: ", err), http.StatusBadRequest)
		return
	}
	a := &response{UID: q.Request.UID, Allowed: true}
	if err := judge(r.Context(), q.Request, a); err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	q.Request, q.Response = nil, a
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(q)
}

type patchOperation struct {
	Op    string `json:"op"`
	Path  string `json:"path"`
	Value any    `json:"value"`
}

func (a *response) setPatch(ops ...patchOperation) (err error) {
	a.PatchType = "JSONPatch"
	a.Patch, err = json.Marshal(ops)
	return err
}

// injectSidecar adds a sidecar to a pod.
func injectSidecar(_ context.Context, r *request, a *response) error {
	p := r.Object
	if p.Metadata.Labels["sidecar.example.com/inject"] == "false" ||
		slices.ContainsFunc(p.Spec.Containers, func(c container) bool { return c.Name == "proxy" }) {
		return nil
	}
	mount := []any{map[string]any{"name": "proxy", "mountPath": "/proxy"}}
	part := func(name, command string) map[string]any {
		return map[string]any{
			"name": name, "image": "keelson.dev/tools:v1", "command": []string{"sh", "-c", command},
			"volumeMounts": mount,
		}
	}
	sidecar := part("proxy", "cat /proxy/rules && exec sleep 1000000")
	sidecar["readinessProbe"] = map[string]any{"exec": map[string]any{"command": []string{"test", "-s",
		"/proxy/rules"}}, "periodSeconds": 1}
	ops := []patchOperation{
		{"add", "/metadata/labels/sidecar.example.com~1status", "injected"},
		{"add", "/spec/containers/-", sidecar},
	}
	first := part("proxy-init", "echo redirect > /proxy/rules")
	volume := map[string]any{"name": "proxy", "emptyDir": map[string]any{}}
	ops = append(ops, appendOperation("/spec/initContainers", len(p.Spec.InitContainers), first),
		appendOperation("/spec/volumes", len(p.Spec.Volumes), volume))
	if p.Metadata.Labels == nil {
		ops = append([]patchOperation{{"add", "/metadata/labels", map[string]string{}}}, ops...)
	}
	return a.setPatch(ops...)
}

// appendOperation returns a patch operation that adds v to the list at the path list. length is the
// number of entries of the list; if it is 0, the operation creates the list.
func appendOperation(list string, length int, v any) patchOperation {
	if length == 0 {
		return patchOperation{"add", list, []any{v}}
	}
	return patchOperation{"add", list + "/-", v}
}

func tamperLabels(_ context.Context, _ *request, a *response) error {
	return a.setPatch(patchOperation{"add", "/metadata/labels", map[string]string{"tampered": "yes"}})
}

// constraint is an object of the custom resource that the test installs with the webhook.
type constraint struct {
	Metadata struct {
		Name string `json:"name"`
	} `json:"metadata"`
	Spec struct {
		Limits []string `json:"limits"` // required in each container
		Action string   `json:"action"` // deny or warn
	} `json:"spec"`
}

// checkConstraints reads the constraints from the API for each request, so that a new constraint
// takes effect at once.
func checkConstraints(ctx context.Context, r *request, a *response) error {
	var all struct {
		Items []constraint `json:"items"`
	}
	if err := getFromAPI(ctx, "/apis/policy.example.com/v1/requiredlimits", &all); err != nil {
		return err
	}
	var denied, by []string
	for _, c := range all.Items {
		for _, part := range slices.Concat(r.Object.Spec.InitContainers, r.Object.Spec.Containers) {
			for _, limit := range c.Spec.Limits {
				if part.Resources.Limits[limit] != nil {
					continue
				}
				words := fmt.Sprintf("[%s] all containers must have resource limits: %s has no limit of %s",
					c.Metadata.Name, part.Name, limit)
				if c.Spec.Action == "warn" {
					a.Warnings = append(a.Warnings, words)
					continue
				}
				denied, by = append(denied, words), append(by, c.Metadata.Name)
			}
		}
	}
	if len(denied) > 0 {
		a.Allowed, a.Status = false, &status{http.StatusForbidden, "Forbidden", strings.Join(denied, "\n")}
		a.AuditAnnotations = map[string]string{"denied-by": strings.Join(slices.Compact(by), ",")}
	}
	return nil
}

// getFromAPI reads a path of the API into result, with the token and the CA that every pod has.
func getFromAPI(ctx context.Context, path string, result any) error {
	const account = "/var/run/secrets/kubernetes.io/serviceaccount/"
	token, err := os.ReadFile(account + "token")
	if err != nil {
		return err
	}
	ca, err := os.ReadFile(account + "ca.crt")
	if err != nil {
		return err
	}
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(ca)
	c := &http.Client{Timeout: 5 * time.Second, Transport: &http.Transport{
		DisableKeepAlives: true, TLSClientConfig: &tls.Config{RootCAs: roots, MinVersion: tls.VersionTLS12},
	}}
	at := "https://" + os.Getenv("KUBERNETES_SERVICE_HOST") + ":" + os.Getenv("KUBERNETES_SERVICE_PORT") + path
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, at, nil)
	if err != nil {
		return err
	}
	req.Header.Set("Authorization", "Bearer "+string(token))
	resp, err := c.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(io.LimitReader(resp.Body, 4<<20))
	if err == nil && resp.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s: %s", resp.Status, body)
	}
	if err != nil {
		return fmt.Errorf("list constraints: %w", err)
	}
	return json.Unmarshal(body, result)
}
