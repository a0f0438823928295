package crd_test

import (
	"fmt"
	"net/http"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/apiserver/apiservertest"
	"keelson.dev/keelson/internal/memory/memtest"
)

// F15: every verb, each kind of patch, both subresources and apply by the schema's list keys, as
// kinds have them that are built in.
func TestVerbsOfCustomResources(t *testing.T) {
	r := apiservertest.WithDefinitions(t)
	c := r.AdminHTTP()
	r.Establish(c, apiservertest.Crontabs)
	one := crontabsPath + "/a"
	body := []string{"Content-Type", "application/json"}
	merge, jsonPatch, apply := "application/merge-patch+json", "application/json-patch+json",
		"application/apply-patch+yaml"
	r.OK(r.Call(c, "POST", crontabsPath, apiservertest.Crontab("a", `{"cronSpec":"* * * * *"}`), body...), `"uid"`)
	r.Refused(r.Call(c, "POST", crontabsPath, apiservertest.Crontab("a", `{"cronSpec":"* * * * *"}`), body...), 409,
		"already exists")
	r.Refused(r.Call(c, "PATCH", one, `{}`, "Content-Type", "application/strategic-merge-patch+json"), 415, merge)
	r.OK(r.Call(c, "PATCH", one, `{"spec":{"replicas":3}}`, "Content-Type", merge), `"replicas":3`, `"generation":2`)
	r.Refused(r.Call(c, "PATCH", one, `{"spec":{"replicas":2}}`, "Content-Type", merge), 422, "replicas only grow")
	r.OK(r.Call(c, "PATCH", one, `[{"op":"replace","path":"/spec/image","value":"i"}]`, "Content-Type", jsonPatch),
		`"image":"i"`)
	r.Refused(r.Call(c, "PATCH", one+"?fieldValidation=Strict", `{"spec":{"bogus":2}}`, "Content-Type", merge), 400,
		`unknown field "spec.bogus"`)

	ports := func(manager, list string) apiservertest.Response {
		return r.Call(c, "PATCH", one+"?fieldManager="+manager,
			strings.Replace(apiservertest.Crontab("a", `{"ports":`+list+`}`), "\n", "", -1), "Content-Type", apply)
	}
	r.OK(ports("one", `[{"name":"x","number":1}]`))
	if got := r.OK(ports("two", `[{"name":"y","number":2}]`)).Body; !strings.Contains(got, `"name":"x"`) ||
		!strings.Contains(got, `k:{\"name\":\"y\"}`) {
		t.Errorf("ports are not merged by their names: %s", got)
	}
	r.Refused(ports("two", `[{"name":"x","number":3}]`), 409, `conflict with "one": .spec.ports[name="x"].number`)
	r.Refused(ports("two", `[{"name":"z","colour":3}]`), 400, "colour")

	status := r.OK(r.Call(c, "PATCH", one+"/status",
		`{"status":{"replicas":2,"selector":"a=b"},"spec":{"image":"other"}}`, "Content-Type", merge),
		`"replicas":2`).Body
	if strings.Contains(status, "other") {
		t.Errorf("the status changed the spec: %s", status)
	}
	r.Refused(r.Call(c, "PATCH", one+"/status", `{"status":{"replicas":"many"}}`, "Content-Type", merge), 422,
		"status.replicas")
	r.OK(r.Call(c, "GET", one+"/scale", ""), `"kind":"Scale"`, `"replicas":3`, `"selector":"a=b"`)
	r.OK(r.Call(c, "PATCH", one+"/scale", `{"spec":{"replicas":5}}`, "Content-Type", merge), `"replicas":5`)
	r.OK(r.Call(c, "GET", one, ""), `"replicas":5`)
	r.Refused(r.Call(c, "PATCH", one+"/scale", `{"spec":{"replicas":50}}`, "Content-Type", merge), 422,
		"should be less than or equal to 10")

	got := r.OK(r.Call(c, "GET", one, "")).Body
	r.OK(r.Call(c, "PUT", one, got, body...))
	r.OK(r.Call(c, "POST", crontabsPath, apiservertest.Crontab("b", `{"cronSpec":"* * * * *"}`), body...))
	r.OK(r.Call(c, "DELETE", crontabsPath+"/b", ""))
	r.OK(r.Call(c, "DELETE", crontabsPath, ""))
	if left := r.OK(r.Call(c, "GET", crontabsPath, "")).Body; !strings.Contains(left, `"items":[]`) {
		t.Errorf("left: %s", left)
	}
}

// F15: the schema of a definition is in both OpenAPI documents as soon as it is established, and
// changes with it.
func TestModelsOfCustomResources(t *testing.T) {
	r := apiservertest.WithDefinitions(t)
	c := r.AdminHTTP()
	r.Establish(c, apiservertest.Crontabs)
	shown := func(what string) error {
		for _, path := range []string{"/openapi/v2", "/openapi/v3/apis/stable.example.com/v1"} {
			a := r.Call(c, "GET", path, "")
			for _, text := range []string{`"com.example.stable.v1.CronTab"`,
				`"com.example.stable.v1.CronTabList"`, what} {
				if a.Code != http.StatusOK || !strings.Contains(a.Body, text) {
					return fmt.Errorf("%s: %d, without %q", path, a.Code, text)
				}
			}
		}
		return nil
	}
	r.Eventually(func() error { return shown("When it runs.") })
	r.OK(r.Call(c, "PATCH", apiservertest.DefinitionsPath+"/crontabs.stable.example.com",
		`[{"op":"replace",`+
			`"path":"/spec/versions/0/schema/openAPIV3Schema/properties/spec/properties/cronSpec/description",`+
			`"value":"Whenever."}]`,
		"Content-Type", "application/json-patch+json"))
	began := time.Now()
	r.Eventually(func() error { return shown("Whenever.") })
	t.Logf("published after %v", time.Since(began))
}

// looseKinds are definitions that preserve unknown fields: at the root, and in an embedded object.
const looseKinds = `{"apiVersion":"apiextensions.k8s.io/v1","kind":"CustomResourceDefinition",
"metadata":{"name":"loose.example.com"},"spec":{"group":"example.com","scope":"Namespaced",
"names":{"plural":"loose","singular":"loose","kind":"Loose","listKind":"LooseList"},
"versions":[{"name":"v1","served":true,"storage":true,"schema":{"openAPIV3Schema":{"type":"object",
"x-kubernetes-preserve-unknown-fields":true}}},
{"name":"v2","served":true,"storage":false,"selectableFields":[{"jsonPath":".spec.color"}],
"schema":{"openAPIV3Schema":{"type":"object","description":"A loose kind.","properties":{
"spec":{"type":"object","properties":{"color":{"type":"string","default":"red"},
"template":{"type":"object","x-kubernetes-embedded-resource":true,"properties":{"data":{"type":"string"}}},
"raw":{"type":"object","x-kubernetes-embedded-resource":true,"x-kubernetes-preserve-unknown-fields":true}}}}}}}]}}`

// F15: the definitions of custom resources are published as Kubernetes publishes them: without
// properties in v2 where unknown fields are preserved, and with the fields of objects where objects
// are embedded.
func TestPublishedDefinitionsOfCustomResources(t *testing.T) {
	r := apiservertest.WithDefinitions(t)
	c := r.AdminHTTP()
	r.Establish(c, looseKinds)
	object, keeps := `"x-kubernetes-embedded-resource":true`, `,"x-kubernetes-preserve-unknown-fields":true`
	field := func(name string) string {
		return `"` + name + `":{"description":` + strconv.Quote(metav1.TypeMeta{}.SwaggerDoc()[name]) +
			`,"type":"string"}`
	}
	meta := strconv.Quote(metav1.PartialObjectMetadata{}.SwaggerDoc()["metadata"])
	const objectMeta = `io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta"`
	ref2 := `"metadata":{"$ref":"#/definitions/` + objectMeta + `,"description":` + meta + `}`
	ref3 := `"metadata":{"allOf":[{"$ref":"#/components/schemas/` + objectMeta + `}],"description":` + meta + `}`
	names := field("apiVersion") + `,` + field("kind") + `,`
	gvk := func(version string) string {
		return `"x-kubernetes-group-version-kind":[{"group":"example.com","kind":"Loose","version":"` + version + `"}]`
	}
	selectable := `,"x-kubernetes-selectable-fields":[{"fieldPath":"spec.color"}]`
	whole := func(meta, spec string) string {
		return `"com.example.v2.Loose":{"description":"A loose kind.","properties":{` + names + meta +
			`,"spec":` + spec + `},"type":"object",` + gvk("v2") + selectable + `}`
	}
	template := func(meta string) string {
		return `"template":{"properties":{` + field("apiVersion") + `,"data":{"type":"string"},` +
			field("kind") + `,` + meta +
			`},"required":["kind","apiVersion"],"type":"object",` + object + `}`
	}
	for path, want := range map[string][]string{
		"/openapi/v2": {
			`"com.example.v1.Loose":{"type":"object",` + gvk("v1") + `}`,
			whole(ref2, `{"properties":{"color":{"type":"string"},"raw":{`+object+keeps+`},`+template(ref2)+
				`},"type":"object"}`),
			`"operationId":"listExampleComV1LooseForAllNamespaces"`,
			`"operationId":"deleteExampleComV1CollectionNamespacedLoose"`,
			`"consumes":["application/json","application/yaml"]`,
		},
		"/openapi/v3/apis/example.com/v1": {
			`"com.example.v1.Loose":{"properties":{` + names + ref3 + `},"type":"object",` + gvk("v1") + keeps + `}`,
		},
		"/openapi/v3/apis/example.com/v2": {
			whole(ref3, `{"properties":{"color":{"default":"red","type":"string"},"raw":{"properties":{`+names+ref3+
				`},"required":["kind","apiVersion"],"type":"object",`+object+keeps+`},`+template(ref3)+
				`},"type":"object"}`),
		},
	} {
		r.Eventually(func() error {
			a := r.Call(c, "GET", path, "")
			for _, text := range want {
				if a.Code != http.StatusOK || !strings.Contains(a.Body, text) {
					at := max(0, strings.Index(a.Body, `"com.example.v`))
					return fmt.Errorf("%s: %d without %s: %s", path, a.Code, text, a.Body[at:min(len(a.Body), at+3000)])
				}
			}
			return nil
		})
	}
}

// Definitions that nobody uses take little memory and no goroutine, large ones too: schemas are
// kept packed, and nothing is compiled before it is needed.
func TestManyDefinitions(t *testing.T) {
	for _, c := range []struct {
		name       string
		n          int
		properties int // that each schema has besides
		most       int64
	}{{"small", 500, 0, 60 << 20}, {"of 23 KB", 500, 100, 60 << 20}} {
		t.Run(c.name, func(t *testing.T) { manyDefinitions(t, c.n, c.properties, c.most) })
	}
}

func manyDefinitions(t *testing.T, n, properties int, most int64) {
	r := apiservertest.WithDefinitions(t)
	c := r.AdminHTTP()
	r.Establish(c, apiservertest.Crontabs)
	docs := make([]string, n)
	for i := range docs {
		docs[i] = manyOf(t, i, properties)
	}
	before := memtest.LiveHeap()
	goroutines := runtime.NumGoroutine()
	for _, doc := range docs {
		r.OK(r.Call(c, "POST", apiservertest.DefinitionsPath, doc, "Content-Type", "application/json"))
	}
	r.Condition(c, fmt.Sprintf("c%d.stable.example.com", n-1), "Established", "True")
	r.Eventually(func() error {
		if have := len(r.Kinds.All()); have < n {
			return fmt.Errorf("%d kinds", have)
		}
		return nil
	})
	grown := memtest.LiveHeap() - before
	t.Logf("%d definitions of %d bytes: %.1f MiB of heap, %d goroutines", n, len(docs[0]), float64(grown)/(1<<20),
		runtime.NumGoroutine()-goroutines)
	if grown > most {
		t.Errorf("%d definitions of %d bytes take %d MiB", n, len(docs[0]), grown>>20)
	}
	if more := runtime.NumGoroutine() - goroutines; more > 20 {
		t.Errorf("%d definitions run %d goroutines", n, more)
	}
	runtime.KeepAlive(docs) // they count before and after
}

// manyOf returns the definition of a kind with the given number of properties.
func manyOf(t *testing.T, i, properties int) string {
	t.Helper()
	name := strconv.Itoa(i)
	change := []string{"metadata/name", "c" + name + ".stable.example.com", "spec/names",
		"{plural: c" + name + ", kind: C" + name + "}"}
	if properties > 0 {
		more := make([]string, properties)
		for p := range more {
			more[p] = fmt.Sprintf("name%d: {type: object, description: Field %d of kind %d says how much of each part "+
				"may be taken at once., "+
				"properties: {a: {type: string, maxLength: 63}, b: {type: integer, format: int32}}}", p, p, i)
		}
		change = append(change, "spec/versions/0/schema/openAPIV3Schema/properties/more",
			"{type: object, properties: {"+strings.Join(more, ", ")+"}}")
	}
	return changed(t, apiservertest.Crontabs, change...)
}

// A definition whose versions are all switched off is no kind to clients; its objects are there,
// and go with it.
func TestDefinitionThatIsNotServed(t *testing.T) {
	r := apiservertest.WithDefinitions(t)
	c := r.AdminHTTP()
	r.Establish(c, apiservertest.Crontabs)
	r.OK(r.Call(c, "POST", crontabsPath, apiservertest.Crontab("a", `{"cronSpec":"* * * * *"}`), "Content-Type",
		"application/json"))
	served := func(now string) {
		r.OK(r.Call(c, "PATCH", apiservertest.DefinitionsPath+"/crontabs.stable.example.com",
			`[{"op":"replace","path":"/spec/versions/0/served","value":`+now+`}]`, "Content-Type",
			"application/json-patch+json"))
	}
	served("false")
	r.Eventually(func() error {
		if a := r.Call(c, "GET", crontabsPath+"/a", ""); a.Code != 404 {
			return fmt.Errorf("%d", a.Code)
		}
		return nil
	})
	r.Refused(r.Call(c, "GET", "/apis/stable.example.com/v1", ""), 404)
	r.Drop(c, "crontabs.stable.example.com")
	r.Establish(c, apiservertest.Crontabs)
	if left := r.OK(r.Call(c, "GET", crontabsPath, "")).Body; !strings.Contains(left, `"items":[]`) {
		t.Errorf("left: %s", left)
	}
}
