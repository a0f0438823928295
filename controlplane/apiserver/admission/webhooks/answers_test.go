package webhooks

import (
	"context"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	admissionv1 "k8s.io/api/admission/v1"
	arv1 "k8s.io/api/admissionregistration/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/apiserver/admission/matching"
)

// A webhook receives a complete AdmissionReview in the first supported version in its list.
func TestQuestion(t *testing.T) {
	ca := newAuthority(t)
	for _, version := range []string{"v1", "v1beta1"} {
		var got admissionv1.AdmissionReview
		var query string
		srv := ca.server(t, func(w http.ResponseWriter, r *http.Request) {
			query = r.URL.RawQuery
			if err := json.NewDecoder(r.Body).Decode(&got); err != nil || r.URL.Path != "/ask" {
				t.Errorf("%s: %v", r.URL, err)
			}
			_ = json.NewEncoder(w).Encode(map[string]any{
				"apiVersion": "admission.k8s.io/" + version, "kind": "AdmissionReview",
				"response": map[string]any{"uid": got.Request.UID, "allowed": true},
			})
		})
		h := hookAt("a.example.com", srv.URL+"/ask", ca.pem)
		h.AdmissionReviewVersions = []string{"v2", version, "v1"}
		h.TimeoutSeconds = new(int32(7))
		w := newWebhooks(t)
		w.Validating().Set(validating("c", h))
		a := podAttempt()
		a.DryRun = true
		if err := w.Validate(t.Context(), a); err != nil {
			t.Fatal(err)
		}
		r := got.Request
		if got.APIVersion != "admission.k8s.io/"+version || got.Kind != "AdmissionReview" || r.UID == "" ||
			r.Kind.Kind != "Pod" || r.Resource.Resource != "pods" || r.RequestKind.Kind != "Pod" ||
			r.RequestResource.Version != "v1" || r.Name != "p" || r.Namespace != "default" || r.Operation != "CREATE" ||
			r.UserInfo.Username != "jane" || r.UserInfo.UID != "7" || r.UserInfo.Groups[0] != "dev" ||
			r.UserInfo.Extra["scopes"][0] != "a" || !*r.DryRun ||
			!strings.Contains(string(r.Options.Raw), "CreateOptions") ||
			!strings.Contains(string(r.Object.Raw), `"image":"i"`) || len(r.OldObject.Raw) != 0 {
			t.Errorf("%s: the webhook got %+v", version, r)
		}
		if query != "timeout=7s" {
			t.Errorf("the webhook was told %q", query)
		}
	}
}

// Denials have the message format of Kubernetes and the webhook's code.
func TestDenial(t *testing.T) {
	ca := newAuthority(t)
	for _, tc := range []struct {
		said *metav1.Status
		want string
		code int32
	}{
		{nil, `admission webhook "d.example.com" denied the request without explanation`, 400},
		{&metav1.Status{Message: "you shall not pass"},
			`admission webhook "d.example.com" denied the request: you shall not pass`, 400},
		{&metav1.Status{Reason: "Forbidden"}, `admission webhook "d.example.com" denied the request: Forbidden`, 400},
		{&metav1.Status{Code: 403, Message: "no"}, `admission webhook "d.example.com" denied the request: no`, 403},
		{&metav1.Status{Code: 200, Message: "no"}, `admission webhook "d.example.com" denied the request: no`, 400},
		{&metav1.Status{Code: 12345, Message: "no"}, `admission webhook "d.example.com" denied the request: no`, 400},
		{&metav1.Status{Code: -3, Status: "Success"},
			`admission webhook "d.example.com" denied the request without explanation`, 400},
	} {
		srv := ca.server(t, says(t, admissionv1.AdmissionResponse{Result: tc.said}))
		w := newWebhooks(t)
		w.Validating().Set(validating("c", hookAt("d.example.com", srv.URL, ca.pem)))
		err := w.Validate(t.Context(), podAttempt())
		status, ok := err.(*apierrors.StatusError)
		if !ok || status.ErrStatus.Message != tc.want || status.ErrStatus.Code != tc.code ||
			status.ErrStatus.Status != "Failure" {
			t.Errorf("%+v: %#v", tc.said, err)
		}
		if n := counted(t, w, "rejection_count", "no_error", strconv.Itoa(int(tc.code))); n != 1 {
			t.Errorf("%+v: %v rejections are counted", tc.said, n)
		}
	}
}

// A limited number of annotations and warnings reaches the audit event and the client.
func TestAnnotationsAndWarnings(t *testing.T) {
	ca := newAuthority(t)
	out := admissionv1.AdmissionResponse{Allowed: true,
		AuditAnnotations: map[string]string{"why": "because", "a/b": "no key"}}
	for range 1000 {
		out.Warnings = append(out.Warnings, strings.Repeat("w", len(out.Warnings)+1))
	}
	srv := ca.server(t, says(t, out))
	w := newWebhooks(t)
	w.Validating().Set(validating("c", hookAt("a.example.com", srv.URL, ca.pem)))
	ctx, notes, warnings := heard(t)
	if err := w.Validate(ctx, podAttempt()); err != nil {
		t.Fatal(err)
	}
	if len(notes.said) != 1 || notes.said["a.example.com/why"] != "because" {
		t.Errorf("%v", notes.said)
	}
	if n := len(warnings()); n != maxWarnings {
		t.Errorf("%d warnings", n)
	}
}

// hostile returns webhooks with invalid responses and the expected errors, by case name.
func hostile(t *testing.T, stop <-chan struct{}) map[string]struct {
	serve http.HandlerFunc
	want  string
} {
	kind := admissionv1.PatchTypeJSONPatch
	raw := func(text string) http.HandlerFunc {
		return func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte(text)) }
	}
	return map[string]struct {
		serve http.HandlerFunc
		want  string
	}{
		"hanging": {func(_ http.ResponseWriter, r *http.Request) {
			_, _ = io.Copy(io.Discard, r.Body) // the end of the connection is detected only after the body is read
			select {
			case <-stop:
			case <-r.Context().Done():
			}
		}, "context deadline exceeded"},
		"endless": {func(w http.ResponseWriter, _ *http.Request) {
			for chunk := []byte(strings.Repeat("x", 1<<16)); ; {
				if _, err := w.Write(chunk); err != nil {
					return
				}
			}
		}, "exceeds"},
		"endless header": {func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("X", strings.Repeat("x", 1<<20))
			w.WriteHeader(http.StatusOK)
		}, "headers exceeded"},
		"other uid": {answering(t, func(_ *admissionv1.AdmissionRequest, o *admissionv1.AdmissionResponse) {
			o.UID = "other"
		}), `received invalid webhook response: expected response.uid=`},
		"other version": {func(w http.ResponseWriter, r *http.Request) {
			var review admissionv1.AdmissionReview
			_ = json.NewDecoder(r.Body).Decode(&review)
			_ = json.NewEncoder(w).Encode(map[string]any{"apiVersion": "admission.k8s.io/v1beta1",
				"kind":     "AdmissionReview",
				"response": map[string]any{"uid": review.Request.UID, "allowed": true}})
		}, "expected webhook response of admission.k8s.io/v1, Kind=AdmissionReview, got admission.k8s.io/v1beta1"},
		"no response": {raw(`{"apiVersion":"admission.k8s.io/v1","kind":"AdmissionReview"}`),
			"webhook response was absent"},
		"null":    {raw(`null`), "webhook response was absent"},
		"no JSON": {raw(`allowed`), "json parse error"},
		"nothing": {raw(``), "json parse error"},
		"deep": {raw(`{"response":` + strings.Repeat("[", 5000) + strings.Repeat("]", 5000) + `}`),
			"received invalid webhook response"},
		"many values": {raw(`{"response":{"warnings":[` + strings.Repeat(`"",`, 1<<16) + `""]}}`),
			"exceeds a decoding limit"},
		"redirecting": {http.RedirectHandler("https://127.0.0.1:1/", http.StatusTemporaryRedirect).ServeHTTP,
			"status code 307"},
		"failing": {func(w http.ResponseWriter, _ *http.Request) {
			http.Error(w, "secret", http.StatusInternalServerError)
		}, "status code 500"},
		"closing": {func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) }, "EOF"},
		"closing late": {func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Length", "1000")
			_, _ = w.Write([]byte(`{"apiVersion":`))
			w.(http.Flusher).Flush()
			panic(http.ErrAbortHandler)
		}, "unexpected EOF"},
		"patching": {patching(t, `[]`), "validating webhook may not return response.patch"},
		"type without patch": {says(t, admissionv1.AdmissionResponse{Allowed: true, PatchType: &kind}),
			"may not return response.patchType"},
	}
}

// A webhook with an invalid response fails the request or is ignored, by its failure policy. The
// error contains no text of the response, and memory use is limited.
func TestHostileWebhooks(t *testing.T) {
	ca, stop := newAuthority(t), make(chan struct{})
	defer close(stop)
	for name, tc := range hostile(t, stop) {
		t.Run(name, func(t *testing.T) {
			srv := ca.server(t, tc.serve)
			h := hookAt("h.example.com", srv.URL, ca.pem)
			h.TimeoutSeconds = new(int32(1))
			w := newWebhooks(t)
			w.Validating().Set(validating("c", h))
			var before, after runtime.MemStats
			runtime.ReadMemStats(&before)
			err := w.Validate(t.Context(), podAttempt())
			runtime.ReadMemStats(&after)
			if took := (after.TotalAlloc - before.TotalAlloc) >> 20; took > 48 {
				t.Errorf("it took %d MiB", took)
			}
			if !apierrors.IsInternalError(err) || !strings.Contains(err.Error(), tc.want) ||
				strings.Contains(err.Error(), "secret") ||
				!strings.HasPrefix(err.Error(), `Internal error occurred: failed calling webhook "h.example.com": `) {
				t.Errorf("%v", err)
			}
			if n := counted(t, w, "rejection_count", "calling_webhook_error"); n != 1 {
				t.Errorf("%v rejections are counted", n)
			}
			h.FailurePolicy = new(arv1.Ignore)
			w.Validating().Set(validating("c", h))
			ctx, notes, _ := heard(t)
			if err := w.Validate(ctx, podAttempt()); err != nil {
				t.Errorf("to be ignored: %v", err)
			}
			if notes.said["failed-open.validating.webhook.admission.k8s.io/round_0_index_0"] != "h.example.com" {
				t.Errorf("the audit record knows %v", notes.said)
			}
			if n := counted(t, w, "fail_open_count", "h.example.com", "validating"); n != 1 {
				t.Errorf("%v failures are counted", n)
			}
		})
	}
}

// The server certificate must be signed by the CA bundle and name the Service. The Service is
// dialed by its name and port.
func TestServiceAndCertificate(t *testing.T) {
	ca, stranger := newAuthority(t), newAuthority(t)
	allow := says(t, admissionv1.AdmissionResponse{Allowed: true})
	srv := ca.server(t, func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/v" || r.Host != "webhook.hooks.svc:8443" && r.Host != "other.hooks.svc:8443" {
			t.Errorf("asked at %s%s", r.Host, r.URL.Path)
		}
		allow(w, r)
	})
	d := &dialer{to: srv.Listener.Addr().String()}
	service := func(name string, bundle []byte) arv1.ValidatingWebhook {
		h := hookAt("s.example.com", "", bundle)
		h.ClientConfig.URL = nil
		h.ClientConfig.Service = &arv1.ServiceReference{Namespace: "hooks", Name: name, Port: new(int32(8443)),
			Path: new("/v")}
		return h
	}
	w := newWebhooks(t, func(c *Config) { c.Services = d })
	for _, tc := range []struct {
		hook arv1.ValidatingWebhook
		want string
	}{
		{service("webhook", ca.pem), ""},
		{service("webhook", stranger.pem), "certificate signed by unknown authority"},
		{service("webhook", nil), "certificate"},
		{service("other", ca.pem), "certificate is valid for webhook.hooks.svc, not other.hooks.svc"},
		{service("webhook", []byte("no bundle")), "unable to load root certificates"},
		{hookAt("s.example.com", "http://127.0.0.1:1", ca.pem), "is not an https URL"},
	} {
		w.Validating().Replace(nil)
		w.Validating().Set(validating("c", tc.hook))
		err := w.Validate(t.Context(), podAttempt())
		if tc.want == "" && err != nil || tc.want != "" && (err == nil || !strings.Contains(err.Error(), tc.want)) {
			t.Errorf("want %q: %v", tc.want, err)
		}
	}
	if !slices.Contains(d.seen, "hooks/webhook") {
		t.Errorf("dialled %v", d.seen)
	}
	if n := len(w.endpoints); n != 1 {
		t.Errorf("%d endpoints are kept for one webhook", n)
	}
}

// In a dry run, a webhook with side effects is not called and the request is rejected, whatever the
// failure policy.
func TestSideEffects(t *testing.T) {
	ca := newAuthority(t)
	asked := 0
	srv := ca.server(t, answering(t, func(*admissionv1.AdmissionRequest, *admissionv1.AdmissionResponse) { asked++ }))
	for effects, allowed := range map[arv1.SideEffectClass]bool{
		arv1.SideEffectClassNone: true, arv1.SideEffectClassNoneOnDryRun: true,
		arv1.SideEffectClassSome: false, arv1.SideEffectClassUnknown: false,
	} {
		asked = 0
		h := hookAt("e.example.com", srv.URL, ca.pem)
		h.SideEffects, h.FailurePolicy = &effects, new(arv1.Ignore)
		w := newWebhooks(t)
		w.Validating().Set(validating("c", h))
		a := podAttempt()
		a.DryRun = true
		err := w.Validate(t.Context(), a)
		if (err == nil) != allowed || asked > 0 != allowed {
			t.Errorf("%s: asked %d times, %v", effects, asked, err)
		}
		if err != nil && (!apierrors.IsBadRequest(err) ||
			err.Error() != `admission webhook "e.example.com" does not support dry run`) {
			t.Errorf("%s: %v", effects, err)
		}
	}
}

// A failure is ignored for writes on which the recovery of the webhook may depend. These are writes
// of cluster components, for heartbeats or in namespaces of webhooks. A denial is not ignored.
func TestLifelines(t *testing.T) {
	ca := newAuthority(t)
	own := func(u string) bool { return u == "system:kube-controller-manager" }
	dead := &dialer{to: closedAddress(t)}
	h := hookAt("l.example.com", "", ca.pem)
	h.ClientConfig.URL = nil
	h.ClientConfig.Service = &arv1.ServiceReference{Namespace: "hooks", Name: "webhook"}
	w := newWebhooks(t, func(c *Config) {
		c.Services = dead
		c.Own = func(u api.User) bool { return own(u.Name) }
	})
	w.Validating().Set(validating("c", h))
	for _, tc := range []struct {
		user, resource, group, namespace string
		through                          bool
	}{
		{"system:kube-controller-manager", "pods", "", "hooks", true},
		{"system:kube-controller-manager", "endpointslices", "discovery.k8s.io", "hooks", true},
		{"system:kube-controller-manager", "pods", "", "default", false},
		{"jane", "pods", "", "hooks", false},
		{"system:kube-controller-manager", "nodes", "", "", true},
		{"jane", "nodes", "", "", false},
		{"system:kube-controller-manager", "leases", "coordination.k8s.io", "kube-node-lease", true},
		{"system:kube-controller-manager", "leases", "coordination.k8s.io", "default", false},
		{"system:kube-controller-manager", "namespaces", "", "", false},
	} {
		a := podAttempt()
		a.User.Name, a.Namespace = tc.user, tc.namespace
		a.Resource.Resource, a.Resource.Group = tc.resource, tc.group
		if err := w.Validate(t.Context(), a); (err == nil) != tc.through {
			t.Errorf("%+v: %v", tc, err)
		}
	}
	srv := ca.server(t, says(t, admissionv1.AdmissionResponse{Result: &metav1.Status{Message: "no"}}))
	dead.to = srv.Listener.Addr().String()
	a := podAttempt()
	a.User.Name, a.Namespace = "system:kube-controller-manager", "hooks"
	if err := w.Validate(t.Context(), a); err == nil || !strings.Contains(err.Error(), "denied the request: no") {
		t.Errorf("a denial: %v", err)
	}
}

// closedAddress returns an address without a listener.
func closedAddress(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().String()
}

// Webhooks are not called for webhook configurations, policies and reviews of permissions.
func TestExempt(t *testing.T) {
	w := newWebhooks(t)
	w.Validating().Set(validating("c", hookAt("x.example.com", "https://"+closedAddress(t), nil)))
	for resource, exempt := range map[[2]string]bool{
		{"admissionregistration.k8s.io", "validatingwebhookconfigurations"}:   true,
		{"admissionregistration.k8s.io", "mutatingwebhookconfigurations"}:     true,
		{"admissionregistration.k8s.io", "validatingadmissionpolicies"}:       true,
		{"admissionregistration.k8s.io", "validatingadmissionpolicybindings"}: true,
		{"admissionregistration.k8s.io", "mutatingadmissionpolicies"}:         true,
		{"admissionregistration.k8s.io", "mutatingadmissionpolicybindings"}:   true,
		{"authorization.k8s.io", "subjectaccessreviews"}:                      true,
		{"authentication.k8s.io", "tokenreviews"}:                             true,
		{"apps", "deployments"}: false,
	} {
		a := podAttempt()
		a.Resource.Group, a.Resource.Resource = resource[0], resource[1]
		if err := w.Validate(t.Context(), a); (err == nil) != exempt {
			t.Errorf("%v: %v", resource, err)
		}
		if err := w.Mutate(t.Context(), a, &matching.Rounds{}); err != nil {
			t.Errorf("%v: %v", resource, err)
		}
	}
}

// F41: validating webhooks are called concurrently up to a limit, and the first in order decides.
func TestValidatingAtOnce(t *testing.T) {
	ca := newAuthority(t)
	arrived, let := make(chan struct{}, 100), make(chan struct{})
	srv := ca.server(t, answering(t, func(r *admissionv1.AdmissionRequest, o *admissionv1.AdmissionResponse) {
		arrived <- struct{}{}
		<-let
		o.Allowed, o.Result = false, &metav1.Status{Message: "no"}
	}))
	var hooks []arv1.ValidatingWebhook
	for i := range maxConcurrentCalls + 3 {
		hooks = append(hooks, hookAt(string(rune('a'+i))+".example.com", srv.URL, ca.pem))
	}
	w := newWebhooks(t)
	w.Validating().Set(validating("z", hooks[0]))
	w.Validating().Set(validating("b", hooks[1:]...))
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	done := make(chan error, 1)
	go func() { done <- w.Validate(ctx, podAttempt()) }()
	for range maxConcurrentCalls {
		<-arrived
	}
	select {
	case <-arrived:
		t.Error("too many are asked at once")
	default:
	}
	close(let)
	if err := <-done; err == nil || !strings.Contains(err.Error(), `"b.example.com" denied`) {
		t.Errorf("%v", err)
	}
}
