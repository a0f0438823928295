package openapi

import (
	"crypto/sha512"
	"encoding/hex"
	"encoding/json"
	"mime"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"

	"keelson.dev/keelson/controlplane/api/kinds"
)

// BenchmarkDocuments builds every document, as the first request after a start does.
func BenchmarkDocuments(b *testing.B) {
	for _, x := range []struct{ path, accept string }{
		{"/openapi/v2", "application/json"}, {"/openapi/v2", protoV2[0]}, {"/openapi/v3", "application/json"},
	} {
		b.Run(x.path+" "+x.accept, func(b *testing.B) {
			b.ReportAllocs()
			for range b.N {
				s := New(kinds.All(), "test")
				r := httptest.NewRequest("GET", x.path, nil)
				r.Header.Set("Accept", x.accept)
				w := httptest.NewRecorder()
				if !s.Serve(w, r) || w.Code != 200 {
					b.Fatalf("%d %s", w.Code, w.Body)
				}
			}
		})
	}
}

func ask(t *testing.T, s *Spec, url, accept string, header ...string) *httptest.ResponseRecorder {
	t.Helper()
	r := httptest.NewRequest("GET", url, nil)
	r.Header.Set("Accept", accept)
	for i := 0; i+1 < len(header); i += 2 {
		r.Header.Set(header[i], header[i+1])
	}
	w := httptest.NewRecorder()
	if !s.Serve(w, r) {
		t.Fatalf("%s is not served", url)
	}
	return w
}

// F40: kubectl parses the media type of an answer and keeps answers on disk, by their ETag. What it
// gets must parse, each representation has a tag of its own, and the tag of an
// answer in an older format (once the hash of the contents alone) is not taken for fresh.
func TestClientsCaches(t *testing.T) {
	s := New(kinds.All(), "test")
	tags := map[string]string{}
	for _, url := range []string{"/openapi/v2", "/openapi/v3/apis/apps/v1"} {
		for _, accept := range []string{"application/json", protoV2[0], protoV2[1], protoV3[0], protoV3[1]} {
			if strings.Contains(accept, "spec.v") &&
				strings.Contains(accept, "spec.v3") != strings.Contains(url, "/v3") {
				continue
			}
			w := ask(t, s, url, accept)
			media, _, err := mime.ParseMediaType(w.Header().Get("Content-Type"))
			if err != nil || w.Code != 200 || (media == "application/json") != (accept == "application/json") {
				t.Errorf("%s as %s: %d %q: %v", url, accept, w.Code, w.Header().Get("Content-Type"), err)
			}
			tag := w.Header().Get("ETag")
			if other, taken := tags[tag]; taken && other != url+media {
				t.Errorf("%s as %s has the tag of %s", url, media, other)
			}
			tags[tag] = url + media
			if again := ask(t, s, url, accept, "If-None-Match", tag); again.Code != 304 || again.Body.Len() > 0 {
				t.Errorf("%s as %s with its tag: %d", url, accept, again.Code)
			}
			sum := sha512.Sum512(w.Body.Bytes())
			if old := ask(t, s, url, accept, "If-None-Match",
				`"`+strings.ToUpper(hex.EncodeToString(sum[:]))+`"`); old.Code != 200 {
				t.Errorf("%s as %s with a tag of the first format: %d", url, accept, old.Code)
			}
		}
	}
}

// The index names a document once, whatever representation is asked for then.
func TestIndexedDocuments(t *testing.T) {
	s := New(kinds.All(), "test")
	var index struct {
		Paths map[string]struct{ ServerRelativeURL string }
	}
	if err := json.Unmarshal(ask(t, s, "/openapi/v3", "application/json").Body.Bytes(), &index); err != nil {
		t.Fatal(err)
	}
	url := index.Paths["apis/apps/v1"].ServerRelativeURL
	for _, accept := range []string{"application/json", protoV3[0]} {
		if w := ask(t, s, url, accept); w.Code != 200 ||
			!strings.Contains(w.Header().Get("Cache-Control"), "immutable") ||
			w.Header().Get("Expires") < "A" { // kubectl's cache asks again for what has no time
			t.Errorf("%s as %s: %d, %v", url, accept, w.Code, w.Header())
		}
		if w := ask(t, s, "/openapi/v3/apis/apps/v1?hash=OLD", accept); w.Code != 301 ||
			w.Header().Get("Location") != url {
			t.Errorf("an old hash as %s: %d to %q, want %q", accept, w.Code, w.Header().Get("Location"), url)
		}
	}
}

// F40: explain and validators must know that these may be numbers.
func TestNumberOrString(t *testing.T) {
	s := New(kinds.All(), "test")
	var doc struct {
		Components struct {
			Schemas map[string]struct {
				Type  string
				OneOf []struct{ Type string }
			}
		}
	}
	if err := json.Unmarshal(ask(t, s, "/openapi/v3/apis/apps/v1", "application/json").Body.Bytes(), &doc); err != nil {
		t.Fatal(err)
	}
	for name, other := range map[string]string{"io.k8s.apimachinery.pkg.util.intstr.IntOrString": "integer",
		"io.k8s.apimachinery.pkg.api.resource.Quantity": "number"} {
		found := map[string]bool{}
		for _, o := range doc.Components.Schemas[name].OneOf {
			found[o.Type] = true
		}
		if !found["string"] || !found[other] || doc.Components.Schemas[name].Type != "" {
			t.Errorf("%s: %+v", name, doc.Components.Schemas[name])
		}
	}
}

// F40: an enum value that contains blanks is one value.
func TestEnumValuesKeepTheirBlanks(t *testing.T) {
	body := ask(t, New(kinds.All(), "test"), "/openapi/v3/apis/certificates.k8s.io/v1", "application/json").Body.Bytes()
	spec := schemasIn(t, body)["io.k8s.api.certificates.v1.CertificateSigningRequestSpec"]
	usages := spec["properties"].(object)["usages"].(object)["items"].(object)["enum"].([]any)
	if len(usages) != 23 || !slices.Contains(usages, any("client auth")) || slices.Contains(usages, any("client")) {
		t.Errorf("the enum values of spec.usages are %q", usages)
	}
}
