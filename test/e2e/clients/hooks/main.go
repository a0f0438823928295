// Hooks is an admission webhook as people run them: in pods behind a Service, with a certificate from a Secret that may
// change while it runs. Its paths are what it does:
//
//	/inject       puts a sidecar, what prepares it and a volume into pods, as a service mesh does
//	/constraints  judges pods by the constraints that it finds in the cluster, as a policy engine does
//	/together     allows when four requests wait there at the same time, and says so; it denies one that is left alone
//	/deny         denies
//	/tamper       allows, and sends a patch along, which is not for it to do
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

// review is an AdmissionReview of admission.k8s.io/v1, as far as the webhook looks at it.
type review struct {
	APIVersion string   `json:"apiVersion"`
	Kind       string   `json:"kind"`
	Request    *request `json:"request,omitempty"`
	Response   *answer  `json:"response,omitempty"`
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

type answer struct {
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
	for path, judge := range map[string]func(context.Context, *request, *answer) error{
		"/inject": inject, "/constraints": constraints, "/tamper": tamper,
		"/together": (&party{}).together,
		"/deny": func(_ context.Context, _ *request, a *answer) error {
			a.Allowed, a.Status = false, &status{http.StatusForbidden, "Forbidden", "never"}
			return nil
		},
		"/allow": func(context.Context, *request, *answer) error { return nil },
	} {
		mux.HandleFunc("POST "+path, func(w http.ResponseWriter, r *http.Request) { serve(w, r, judge) })
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

// party is requests that wait for each other.
type party struct {
	mu   sync.Mutex
	here int
	full chan struct{} // of those who are here
}

// together waits for three others, for less long than who asks waits for an answer.
func (p *party) together(ctx context.Context, _ *request, a *answer) error {
	p.mu.Lock()
	if p.here == 0 {
		p.full = make(chan struct{})
	}
	full := p.full
	if p.here++; p.here == 4 {
		close(full)
		p.here = 0
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
	case <-full: // at the last moment
		return nil
	default:
	}
	p.here--
	a.Allowed, a.Status = false, &status{http.StatusForbidden, "Forbidden", "nobody else was asked meanwhile"}
	return nil
}

func serve(w http.ResponseWriter, r *http.Request, judge func(context.Context, *request, *answer) error) {
	var q review
	if err := json.NewDecoder(http.MaxBytesReader(w, r.Body, 8<<20)).Decode(&q); err != nil || q.Request == nil {
		http.Error(w, fmt.Sprint("not a review: ", err), http.StatusBadRequest)
		return
	}
	a := &answer{UID: q.Request.UID, Allowed: true}
	if err := judge(r.Context(), q.Request, a); err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	q.Request, q.Response = nil, a
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(q)
}

type operation struct {
	Op    string `json:"op"`
	Path  string `json:"path"`
	Value any    `json:"value"`
}

func (a *answer) patch(ops ...operation) (err error) {
	a.PatchType = "JSONPatch"
	a.Patch, err = json.Marshal(ops)
	return err
}

func inject(_ context.Context, r *request, a *answer) error {
	p := r.Object
	if p.Metadata.Labels["sidecar.example.com/inject"] == "false" ||
		slices.ContainsFunc(p.Spec.Containers, func(c container) bool { return c.Name == "proxy" }) {
		return nil
	}
	mount := []any{map[string]any{"name": "proxy", "mountPath": "/proxy"}}
	part := func(name, command string) map[string]any {
		return map[string]any{
			"name": name, "image": "keelson.dev/tools:v1", "command": []string{"sh", "-c", command}, "volumeMounts": mount,
		}
	}
	sidecar := part("proxy", "cat /proxy/rules && exec sleep 1000000")
	sidecar["readinessProbe"] = map[string]any{"exec": map[string]any{"command": []string{"test", "-s", "/proxy/rules"}}, "periodSeconds": 1}
	ops := []operation{
		{"add", "/metadata/labels/sidecar.example.com~1status", "injected"},
		{"add", "/spec/containers/-", sidecar},
	}
	first := part("proxy-init", "echo redirect > /proxy/rules")
	volume := map[string]any{"name": "proxy", "emptyDir": map[string]any{}}
	ops = append(ops, into("/spec/initContainers", len(p.Spec.InitContainers), first), into("/spec/volumes", len(p.Spec.Volumes), volume))
	if p.Metadata.Labels == nil {
		ops = append([]operation{{"add", "/metadata/labels", map[string]string{}}}, ops...)
	}
	return a.patch(ops...)
}

// into adds to a list, which has to be made when nothing is in it.
func into(list string, length int, v any) operation {
	if length == 0 {
		return operation{"add", list, []any{v}}
	}
	return operation{"add", list + "/-", v}
}

func tamper(_ context.Context, _ *request, a *answer) error {
	return a.patch(operation{"add", "/metadata/labels", map[string]string{"tampered": "yes"}})
}

// constraint is an object of the definition that comes with the webhook.
type constraint struct {
	Metadata struct {
		Name string `json:"name"`
	} `json:"metadata"`
	Spec struct {
		Limits []string `json:"limits"` // that each container must have
		Action string   `json:"action"` // deny or warn
	} `json:"spec"`
}

// constraints asks the API each time: a constraint is in force from when it is there.
func constraints(ctx context.Context, r *request, a *answer) error {
	var all struct {
		Items []constraint `json:"items"`
	}
	if err := get(ctx, "/apis/policy.example.com/v1/requiredlimits", &all); err != nil {
		return err
	}
	var denied, by []string
	for _, c := range all.Items {
		for _, part := range slices.Concat(r.Object.Spec.InitContainers, r.Object.Spec.Containers) {
			for _, limit := range c.Spec.Limits {
				if part.Resources.Limits[limit] != nil {
					continue
				}
				words := fmt.Sprintf("[%s] all containers must have resource limits: %s has none of %s", c.Metadata.Name, part.Name, limit)
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

// get asks the API with what every pod has.
func get(ctx context.Context, path string, into any) error {
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
		return fmt.Errorf("asking for constraints: %w", err)
	}
	return json.Unmarshal(body, into)
}
