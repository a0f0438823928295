package endpoints

import (
	"context"
	"encoding/json"
	"net/http/httptest"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/kinds"
)

func TestParsePath(t *testing.T) {
	for path, want := range map[string]string{
		"/api/v1/pods":                              "/v1/pods ns= name= sub=",
		"/api/v1/namespaces":                        "/v1/namespaces ns= name= sub=",
		"/api/v1/namespaces/a":                      "/v1/namespaces ns= name=a sub=",
		"/api/v1/namespaces/a/status":               "/v1/namespaces ns= name=a sub=status",
		"/api/v1/namespaces/a/finalize":             "/v1/namespaces ns= name=a sub=finalize",
		"/api/v1/namespaces/a/pods":                 "/v1/pods ns=a name= sub=",
		"/api/v1/namespaces/a/pods/p/log":           "/v1/pods ns=a name=p sub=log",
		"/apis/apps/v1/namespaces/a/deployments/d":  "apps/v1/deployments ns=a name=d sub=",
		"/apis/apps/v1/deployments/":                "apps/v1/deployments ns= name= sub=",
		"/api/v1/watch/namespaces/a/pods/p":         "/v1/pods ns=a name=p sub= watch",
		"/api/v1/namespaces/a/services/s/proxy/x/y": "/v1/services ns=a name=s sub=proxy/x/y",
		"/apis/stable.example.com/v1/crontabs/tick": "stable.example.com/v1/crontabs ns= name=tick sub=",
		"/api":              "",
		"/api/v1":           "",
		"/apis/apps":        "",
		"/apis/apps/v1":     "",
		"/api/v1//pods":     "",
		"/version":          "",
		"/":                 "",
		"/healthz/api/v1/x": "",
	} {
		got := ""
		if x, ok := ParsePath(path); ok {
			got = x.GVR.Group + "/" + x.GVR.Version + "/" + x.GVR.Resource + " ns=" + x.Namespace + " name=" + x.Name +
				" sub=" + x.Subresource
			if x.Watch {
				got += " watch"
			}
		}
		if got != want {
			t.Errorf("%s: %q, want %q", path, got, want)
		}
	}
}

func FuzzParsePath(f *testing.F) {
	f.Add("/api/v1/namespaces/a/pods/p/log")
	f.Add("/apis//v1/x")
	f.Add("api//00")
	f.Fuzz(func(t *testing.T, path string) {
		x, ok := ParsePath(path)
		if ok && (x.GVR.Resource == "" || x.GVR.Version == "" ||
			strings.Contains(x.Name+x.Namespace+x.GVR.Resource, "/")) {
			t.Errorf("%q became %+v", path, x)
		}
	})
}

func FuzzNegotiate(f *testing.F) {
	f.Add("application/json;as=Table;v=v1;g=meta.k8s.io, */*;q=0.1")
	f.Add("application/cbor-seq,application/cbor;q=0.5")
	f.Add("application/vnd.kubernetes.protobuf;as=Table;v=v1;g=meta.k8s.io,application/yaml;q=NaN")
	f.Fuzz(func(t *testing.T, accept string) {
		r := httptest.NewRequest("GET", "/", nil)
		r.Header.Set("Accept", accept)
		form, err := Negotiate(r)
		if err == nil && form.Media == "" || err != nil && !apierrors.IsNotAcceptable(err) {
			t.Errorf("%q: %+v %v", accept, form, err)
		}
		kind := kinds.All().ByResource(schema.GroupVersionResource{Version: "v1", Resource: "pods"})
		for _, verb := range []api.Verb{api.VerbList, api.VerbWatch} {
			form, err := negotiateFor(r, &api.Request{Kind: kind, Verb: verb})
			switch {
			case err != nil && !apierrors.IsNotAcceptable(err),
				err == nil && (form.Media == mediaYAML && verb == api.VerbWatch ||
					form.Media == mediaProto && form.As == viewTable):
				t.Errorf("%s %q: %+v %v", verb, accept, form, err)
			}
		}
	})
}

// Whatever the body, decoding answers with an object of the wanted type or a 400.
func FuzzDecode(f *testing.F) {
	scheme := api.Scheme()
	d := newDecoder(scheme)
	want := corev1.SchemeGroupVersion.WithKind("Pod")
	f.Add([]byte(`{"apiVersion":"v1","kind":"Pod","spec":{"containers":[]}}`), uint8(0), true)
	f.Add([]byte("apiVersion: v1\nkind: Pod\nmetadata: {name: x}\n"), uint8(1), false)
	f.Add([]byte("k8s\x00\n\t\n\x02v1\x12\x03Pod\x12\x00"), uint8(2), true)
	f.Add([]byte("\xd9\xd9\xf7\xa2JapiVersionBv1DkindCPod"), uint8(3), true)
	f.Fuzz(func(t *testing.T, data []byte, media uint8, strict bool) {
		validation := metav1.FieldValidationWarn
		if strict {
			validation = metav1.FieldValidationStrict
		}
		ctx, said := api.WithWarnings(context.Background())
		var pod corev1.Pod
		err := d.decodeObject(ctx, data, []string{mediaJSON, mediaYAML, mediaProto, mediaCBOR}[media%4], want,
			&pod, validation)
		switch {
		case err != nil && !apierrors.IsBadRequest(err) && !apierrors.IsRequestEntityTooLargeError(err):
			t.Errorf("%q: %v", data, err)
		case err == nil && (pod.Kind != "Pod" || pod.APIVersion != "v1"):
			t.Errorf("%q became a %s", data, pod.GroupVersionKind())
		case err == nil && strict && len(said()) > 0:
			t.Errorf("%q: strict decoding only warned: %v", data, said())
		}
	})
}

func FuzzDeleteOptions(f *testing.F) {
	h := New(Config{Scheme: api.Scheme()})
	f.Add([]byte(`{"kind":"DeleteOptions","apiVersion":"v1","propagationPolicy":"Orphan"}`), uint8(0))
	f.Add([]byte("k8s\x00\x12\x02\x08\x05"), uint8(2))
	f.Fuzz(func(t *testing.T, data []byte, media uint8) {
		var r api.Request
		err := h.deleteOptions(data, []string{mediaJSON, mediaYAML, mediaProto}[media%3], &r)
		if err != nil && !apierrors.IsBadRequest(err) && !apierrors.IsInvalid(err) {
			t.Errorf("%q: %v", data, err)
		}
	})
}

func FuzzRawMessage(f *testing.F) {
	f.Add([]byte("k8s\x00\x0a\x02v1\x12\x03abc"))
	f.Fuzz(func(t *testing.T, data []byte) {
		raw, err := rawMessage(data)
		if err == nil && len(raw) > len(data) {
			t.Errorf("%q became %q", data, raw)
		}
	})
}

// The Status of an error is always whole.
func TestStatusOf(t *testing.T) {
	for _, err := range []error{context.DeadlineExceeded, context.Canceled, apierrors.NewBadRequest("x"),
		json.Unmarshal([]byte("{"), &struct{}{})} {
		s := StatusOf(err)
		if s.Kind != "Status" || s.Status != metav1.StatusFailure || s.Code < 400 || s.Message == "" {
			t.Errorf("%v: %+v", err, s)
		}
	}
}
