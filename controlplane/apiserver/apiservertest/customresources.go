package apiservertest

import (
	"bufio"
	"context"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/custom"
	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/controllers/customresourcedefinition"
	"keelson.dev/keelson/controlplane/controllers/engine"
	"keelson.dev/keelson/controlplane/controllers/garbagecollector"
	"keelson.dev/keelson/controlplane/controllers/namespace"
	"keelson.dev/keelson/controlplane/controllers/resourcequota"
	"keelson.dev/keelson/internal/await"
	"keelson.dev/keelson/internal/wait"
)

// DefinitionsPath is the API path of the resource customresourcedefinitions.
const DefinitionsPath = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"

// WithDefinitions starts a replica and the controller of CustomResourceDefinitions.
func WithDefinitions(t testing.TB) *Replica {
	t.Helper()
	r := StartReplica(t, nil)
	r.LeadDefinitions()
	return r
}

// LeadDefinitions runs the controller of CustomResourceDefinitions until the test ends.
func (r *Replica) LeadDefinitions() {
	r.Lead(customresourcedefinition.New)
}

// Lead runs the controllers that news creates until the test ends, and returns their informers.
func (r *Replica) Lead(news ...func(engine.Deps) *engine.Descriptor) *client.Informers {
	c := client.New(r.Server.Backend(), r.Kinds)
	informers := client.NewInformers(c.As(api.User{Name: api.UserAPIServer, Groups: []string{api.GroupMasters}}))
	d := engine.Deps{Client: c, Informers: informers, Replica: "test",
		Log: slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelError}))}
	var all []*engine.Descriptor
	for _, n := range news {
		all = append(all, n(d))
	}
	leader := engine.NewEngine(d, engine.Options{}, all...)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{}, 2)
	go func() { _ = informers.Run(ctx); done <- struct{}{} }()
	if err := informers.WaitForSync(ctx); err != nil {
		r.TB.Fatal(err)
	}
	go func() { _ = leader.Run(ctx, 0); done <- struct{}{} }()
	r.TB.Cleanup(func() { cancel(); <-done; <-done })
	return informers
}

// OK fails the test unless the response is a success that contains the texts.
func (r *Replica) OK(a Response, want ...string) Response {
	r.TB.Helper()
	if a.Code/100 != 2 {
		r.TB.Fatalf("%d %s", a.Code, a.Body)
	}
	for _, w := range want {
		if !strings.Contains(a.Body, w) {
			r.TB.Fatalf("no %s in %s", w, a.Body)
		}
	}
	return a
}

// Refused fails the test unless the response has the code and contains the texts.
func (r *Replica) Refused(a Response, code int, want ...string) {
	r.TB.Helper()
	if a.Code != code {
		r.TB.Fatalf("%d, not %d: %s", a.Code, code, a.Body)
	}
	var s struct{ Message string }
	_ = json.Unmarshal([]byte(a.Body), &s)
	for _, w := range want {
		if !strings.Contains(s.Message, w) {
			r.TB.Fatalf("no %s in %s", w, a.Body)
		}
	}
}

// Establish creates a CustomResourceDefinition and waits until it is established.
func (r *Replica) Establish(c *http.Client, definition string) {
	r.TB.Helper()
	a := r.OK(r.Call(c, "POST", DefinitionsPath, definition, "Content-Type", "application/yaml"))
	var made struct{ Metadata struct{ Name string } }
	if err := json.Unmarshal([]byte(a.Body), &made); err != nil {
		r.TB.Fatal(err)
	}
	r.Condition(c, made.Metadata.Name, "Established", "True")
}

// Condition waits until a condition of a CustomResourceDefinition has the status. It returns the
// reason and message of the condition.
func (r *Replica) Condition(c *http.Client, name, of, status string) (reason, message string) {
	r.TB.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	var last string
	err := wait.For(ctx, 2*time.Millisecond, func() error {
		last = r.OK(r.Call(c, "GET", DefinitionsPath+"/"+name, "")).Body
		var d struct {
			Status struct {
				Conditions []struct{ Type, Status, Reason, Message string }
			}
		}
		if err := json.Unmarshal([]byte(last), &d); err != nil {
			return err
		}
		for _, one := range d.Status.Conditions {
			if one.Type == of && one.Status == status {
				reason, message = one.Reason, one.Message
				return nil
			}
		}
		return ErrNotYet
	})
	if err != nil {
		r.TB.Fatalf("%s of %s is not %s: %s", of, name, status, last)
	}
	return reason, message
}

// ErrNotYet is the error of a wait function if its condition is not met yet.
var ErrNotYet = context.DeadlineExceeded

// Crontabs is a CustomResourceDefinition of the kind CronTab, as YAML.
const Crontabs = `
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: crontabs.stable.example.com}
spec:
  group: stable.example.com
  scope: Namespaced
  names: {plural: crontabs, singular: crontab, kind: CronTab, shortNames: [ct], categories: [all]}
  versions:
  - name: v1
    served: true
    storage: true
    subresources:
      status: {}
      scale: {specReplicasPath: .spec.replicas, statusReplicasPath: .status.replicas, labelSelectorPath: .status.selector}
    selectableFields: [{jsonPath: .spec.image}]
    additionalPrinterColumns:
    - {name: Spec, type: string, jsonPath: .spec.cronSpec}
    - {name: Replicas, type: integer, jsonPath: .spec.replicas}
    - {name: First, type: string, jsonPath: '.spec.ports[0].name', priority: 1}
    - {name: Age, type: date, jsonPath: .metadata.creationTimestamp}
    schema:
      openAPIV3Schema:
        type: object
        description: CronTab runs things at times.
        required: [spec]
        properties:
          spec:
            type: object
            required: [cronSpec]
            properties:
              cronSpec: {type: string, pattern: '^(\d+|\*)(/\d+)?(\s+(\d+|\*)(/\d+)?){4}$', description: When it runs.}
              image: {type: string, default: busybox}
              replicas: {type: integer, minimum: 1, maximum: 10, default: 1}
              port: {x-kubernetes-int-or-string: true}
              mode: {type: string, enum: [Fast, Slow], nullable: true}
              kept: {type: object, x-kubernetes-preserve-unknown-fields: true}
              template: {type: object, x-kubernetes-embedded-resource: true, x-kubernetes-preserve-unknown-fields: true}
              tags: {type: array, x-kubernetes-list-type: set, items: {type: string}}
              ports:
                type: array
                maxItems: 16
                x-kubernetes-list-type: map
                x-kubernetes-list-map-keys: [name]
                items:
                  type: object
                  required: [name]
                  properties:
                    name: {type: string}
                    number: {type: integer, default: 80}
            x-kubernetes-validations:
            - {rule: "!has(self.mode) || self.mode != 'Slow' || self.replicas <= 3", message: slow ones have at most three replicas, fieldPath: .replicas, reason: FieldValueForbidden}
            - {rule: "self.replicas >= oldSelf.replicas", messageExpression: "oldSelf.replicas > 5 ? 'many replicas only grow' : 'replicas only grow'"}
          status:
            type: object
            properties:
              replicas: {type: integer}
              selector: {type: string}
`

// Crontab returns a CronTab with a spec, as JSON.
func Crontab(name, spec string) string {
	return `{"apiVersion":"stable.example.com/v1","kind":"CronTab","metadata":{"name":"` + name +
		`"},"spec":` + spec + `}`
}

// Drop deletes a CustomResourceDefinition and waits until it no longer exists.
func (r *Replica) Drop(c *http.Client, name string) {
	r.TB.Helper()
	r.OK(r.Call(c, "DELETE", DefinitionsPath+"/"+name, ""))
	r.Eventually(func() error {
		if a := r.Call(c, "GET", DefinitionsPath+"/"+name, ""); a.Code != 404 {
			return fmt.Errorf("%d %s", a.Code, a.Body)
		}
		return nil
	})
}

// Eventually waits until condition returns nil.
func (r *Replica) Eventually(condition func() error) {
	r.TB.Helper()
	await.Until(context.Background(), r.TB, await.Patience, 2*time.Millisecond, "the API", condition)
}

// LeadAll runs the controllers of CustomResourceDefinitions, garbage collection, namespaces and
// quotas until the test ends. It returns their informers.
func (r *Replica) LeadAll() *client.Informers {
	return r.Lead(customresourcedefinition.New, garbagecollector.New, namespace.New, resourcequota.New)
}

// Gone waits until the object at a path no longer exists.
func (r *Replica) Gone(c *http.Client, path string) {
	r.TB.Helper()
	r.Eventually(func() error {
		if a := r.Call(c, "GET", path, ""); a.Code != 404 {
			return fmt.Errorf("%s is still there: %d %s", path, a.Code, a.Body)
		}
		return nil
	})
}

// Selected returns the names of the objects at path that match a field selector. It lists them in
// pages of limit objects.
func (r *Replica) Selected(path, selector string, limit int) (names []string) {
	r.TB.Helper()
	c, more := r.AdminHTTP(), ""
	for {
		a := r.OK(r.Call(c, "GET", fmt.Sprintf("%s?fieldSelector=%s&limit=%d&continue=%s", path,
			url.QueryEscape(selector), limit, more), ""))
		var l struct {
			Metadata struct{ Continue string }
			Items    []struct{ Metadata struct{ Name string } }
		}
		if err := json.Unmarshal([]byte(a.Body), &l); err != nil {
			r.TB.Fatal(err)
		}
		if limit > 0 && len(l.Items) > limit {
			r.TB.Errorf("%d items on a page of %d", len(l.Items), limit)
		}
		for _, o := range l.Items {
			names = append(names, o.Metadata.Name)
		}
		if more = l.Metadata.Continue; more == "" {
			return names
		}
	}
}

// GizmosV1 is the API path of Gizmos, a custom resource, in version v1 and namespace default.
const GizmosV1 = "/apis/example.com/v1/namespaces/default/gizmos"

// GizmosV2 is the API path of Gizmos in version v2 and namespace default.
const GizmosV2 = "/apis/example.com/v2/namespaces/default/gizmos"

// Converting is a conversion webhook for Gizmos. If Spoil is set, it may change the response before
// it is sent, or send another response and return true.
type Converting struct {
	*httptest.Server
	Spoil atomic.Pointer[func(w http.ResponseWriter, answer map[string]any) bool]
	Asked atomic.Int64 // number of objects to convert
	Calls atomic.Int64
}

// Conversion returns the field spec.conversion of a CustomResourceDefinition that uses the webhook.
func (c *Converting) Conversion() string {
	ca := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: c.Certificate().Raw})
	bundle, _ := json.Marshal(ca)
	return fmt.Sprintf(`{strategy: Webhook, webhook: {conversionReviewVersions: [v1], clientConfig: {url: %q, `+
		`caBundle: %s}}}`, c.URL+"/convert", bundle)
}

// ServeConversion responds to a ConversionReview. It converts an object by renaming its field
// spec.size to spec.width or back.
func (c *Converting) ServeConversion(w http.ResponseWriter, r *http.Request) {
	var review map[string]any
	data, _ := io.ReadAll(r.Body)
	if err := json.Unmarshal(data, &review); err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	c.Calls.Add(1)
	request := review["request"].(map[string]any)
	var out []any
	for _, o := range request["objects"].([]any) {
		c.Asked.Add(1)
		obj := o.(map[string]any)
		spec, _ := obj["spec"].(map[string]any)
		for from, to := range map[string]string{"size": "width", "width": "size"} {
			if v, ok := spec[from]; ok && obj["apiVersion"] != request["desiredAPIVersion"] {
				spec[to] = v
				delete(spec, from)
				break
			}
		}
		obj["apiVersion"] = request["desiredAPIVersion"]
		out = append(out, obj)
	}
	answer := map[string]any{"apiVersion": review["apiVersion"], "kind": "ConversionReview", "response": map[string]any{
		"uid": request["uid"], "result": map[string]any{"status": "Success"}, "convertedObjects": out,
	}}
	if spoil := c.Spoil.Load(); spoil != nil && (*spoil)(w, answer) {
		return
	}
	_ = json.NewEncoder(w).Encode(answer)
}

// Gizmo returns a Gizmo of an API version, as JSON.
func Gizmo(version, name, spec string) string {
	return `{"apiVersion":"example.com/` + version + `","kind":"Gizmo","metadata":{"name":"` + name +
		`"},"spec":` + spec + `}`
}

// Spoiled makes the conversion webhook return wrong responses. It fails the test if clients do not
// receive an error or if an object is stored.
func (r *Replica) Spoiled(c *http.Client, hook *Converting) {
	response := func(a map[string]any) map[string]any { return a["response"].(map[string]any) }
	first := func(a map[string]any) map[string]any {
		return response(a)["convertedObjects"].([]any)[0].(map[string]any)
	}
	meta := func(a map[string]any) map[string]any { return first(a)["metadata"].(map[string]any) }
	for want, spoil := range map[string]func(http.ResponseWriter, map[string]any) bool{
		`expected response.uid=`: func(_ http.ResponseWriter, a map[string]any) bool {
			response(a)["uid"] = "x"
			return false
		},
		`not today`: func(_ http.ResponseWriter, a map[string]any) bool {
			response(a)["result"] = map[string]any{"status": "Failure", "message": "not today"}
			return false
		},
		`response.result.status was`: func(_ http.ResponseWriter, a map[string]any) bool {
			response(a)["result"] = map[string]any{}
			return false
		},
		`returned 0 objects, expected 1`: func(_ http.ResponseWriter, a map[string]any) bool {
			response(a)["convertedObjects"] = []any{}
			return false
		},
		`no response provided`: func(_ http.ResponseWriter, a map[string]any) bool {
			delete(a, "response")
			return false
		},
		`expected webhook response of`: func(_ http.ResponseWriter, a map[string]any) bool {
			a["apiVersion"] = "v1"
			return false
		},
		`invalid groupVersion`: func(_ http.ResponseWriter, a map[string]any) bool {
			first(a)["apiVersion"] = "example.com/v9"
			return false
		},
		`must have the same kind`: func(_ http.ResponseWriter, a map[string]any) bool {
			first(a)["kind"] = "Other"
			return false
		},
		`must have the same name`: func(_ http.ResponseWriter, a map[string]any) bool {
			meta(a)["name"] = "other"
			return false
		},
		`must have the same UID`: func(_ http.ResponseWriter, a map[string]any) bool {
			meta(a)["uid"] = "other"
			return false
		},
		`metadata.labels`: func(_ http.ResponseWriter, a map[string]any) bool {
			meta(a)["labels"] = map[string]any{"a b": "c"}
			return false
		},
		`the server responded with the status code 500`: func(w http.ResponseWriter, _ map[string]any) bool {
			http.Error(w, "no", 500)
			return true
		},
		`the response is not a Conversion`: func(w http.ResponseWriter, _ map[string]any) bool {
			fmt.Fprint(w, "{")
			return true
		},
		`the response exceeds`: func(w http.ResponseWriter, _ map[string]any) bool {
			Flood(w)
			return true
		},
	} {
		hook.Spoil.Store(&spoil)
		r.Refused(r.Call(c, "POST", GizmosV1, Gizmo("v1", "spoiled", `{"size":3}`), "Content-Type", "application/json"),
			500, want)
	}
	hang := make(chan struct{})
	hook.Spoil.Store(PtrTo(func(http.ResponseWriter, map[string]any) bool { <-hang; return true }))
	a := r.Call(c, "POST", GizmosV1+"?timeout=1s", Gizmo("v1", "spoiled", `{"size":3}`), "Content-Type",
		"application/json")
	close(hang)
	if a.Code != 504 && a.Code != 500 {
		r.TB.Errorf("a webhook that hangs: %d %s", a.Code, a.Body)
	}
	hook.Spoil.Store(nil)
	r.Refused(r.Call(c, "GET", GizmosV2+"/spoiled", ""), 404)
}

// PtrTo returns a pointer to f.
func PtrTo(f func(http.ResponseWriter, map[string]any) bool) *func(http.ResponseWriter, map[string]any) bool {
	return &f
}

// Flood writes to w without end, until a write fails.
func Flood(w io.Writer) {
	junk := []byte(strings.Repeat("x", 64<<10))
	for {
		if _, err := w.Write(junk); err != nil {
			return
		}
	}
}

// Gadgets is the resource of a custom kind that tests register without a CustomResourceDefinition.
var Gadgets = custom.Resource{Group: "example.com", Kind: "Gadget", Plural: "gadgets", Singular: "gadget",
	ShortNames: []string{"gg"}, Namespaced: true}

// GadgetKind returns the kind with the resource Gadgets.
func GadgetKind() *api.Kind {
	return custom.NewKind(Gadgets, "v1", true, custom.NewStorage(Gadgets, "v1"))
}

// GadgetsPath is the API path of Gadgets in namespace default.
const GadgetsPath = "/apis/example.com/v1/namespaces/default/gadgets"

// UseGadgets performs all verbs on Gadget g<round> and fails the test if a response is wrong.
func (r *Replica) UseGadgets(c *http.Client, round int) {
	r.TB.Helper()
	name := fmt.Sprint("g", round)
	ok := func(a Response, want ...string) {
		r.TB.Helper()
		if a.Code/100 != 2 {
			r.TB.Fatalf("%d %s", a.Code, a.Body)
		}
		for _, w := range want {
			if !strings.Contains(a.Body, w) {
				r.TB.Fatalf("no %s in %s", w, a.Body)
			}
		}
	}
	body := `{"apiVersion":"example.com/v1","kind":"Gadget","metadata":{"name":"` + name +
		`"},"spec":{"size":9007199254740993},"status":{"seen":1}}`
	ok(r.Call(c, "POST", GadgetsPath, body, "Content-Type", "application/json"), `"size":9007199254740993`,
		`"generation":1`)
	ok(r.Call(c, "GET", GadgetsPath+"/"+name, ""), `"kind":"Gadget"`, `"size":9007199254740993`)
	if a := r.Call(c, "GET", GadgetsPath+"/"+name, ""); strings.Contains(a.Body, "seen") {
		r.TB.Fatalf("a creation set the status: %s", a.Body)
	}
	patch := "application/merge-patch+json"
	ok(r.Call(c, "PATCH", GadgetsPath+"/"+name+"/status", `{"status":{"seen":2},"spec":{"size":1}}`, "Content-Type",
		patch), `"seen":2`, `"size":9007199254740993`, `"generation":1`)
	ok(r.Call(c, "PATCH", GadgetsPath+"/"+name, `{"status":{"seen":3},"spec":{"size":2}}`, "Content-Type", patch),
		`"seen":2`, `"size":2`, `"generation":2`)
	apply := func(manager, spec string) Response {
		return r.Call(c, "PATCH", GadgetsPath+"/"+name+"?fieldManager="+manager,
			`{"apiVersion":"example.com/v1","kind":"Gadget","metadata":{"name":"`+name+`"},"spec":`+spec+`}`,
			"Content-Type", "application/apply-patch+yaml")
	}
	ok(apply("one", `{"owner":"x","deep":{"a":1}}`), `"owner":"x"`, `"size":2`, `"a":1`, `"manager":"one"`)
	if a := apply("two", `{"owner":"y"}`); a.Code != http.StatusConflict ||
		!strings.Contains(a.Body, `conflict with \"one\": .spec.owner`) {
		r.TB.Fatalf("%d %s", a.Code, a.Body)
	}
	if a := apply("one", `{"deep":{"a":2}}`); strings.Contains(a.Body, `"owner":"x"`) ||
		!strings.Contains(a.Body, `"a":2`) {
		r.TB.Fatalf("what the manager states no more stays: %d %s", a.Code, a.Body)
	}
	strategic := r.Call(c, "PATCH", GadgetsPath+"/"+name, `{}`, "Content-Type",
		"application/strategic-merge-patch+json")
	if strategic.Code != http.StatusUnsupportedMediaType || strings.Contains(strategic.Body, "strategic") ||
		!strings.Contains(strategic.Body, "application/merge-patch+json") {
		r.TB.Fatalf("%d %s", strategic.Code, strategic.Body)
	}
	ok(r.Call(c, "GET", GadgetsPath, "", "Accept", "application/json;as=Table;g=meta.k8s.io;v=v1"), `"`+name+`"`)
	ok(r.Call(c, "GET", GadgetsPath+"?fieldSelector=metadata.name="+name, ""), `"kind":"GadgetList"`, `"`+name+`"`)
	accept := "application/vnd.kubernetes.protobuf, application/json" // the Accept header of a client of typed kinds
	if a := r.Call(c, "GET", GadgetsPath+"/"+name, "", "Accept", accept); a.Header.Get("Content-Type") !=
		"application/json" {
		r.TB.Fatalf("%d %s %s", a.Code, a.Header.Get("Content-Type"), a.Body)
	}
	if a := r.Call(c, "GET", GadgetsPath, "", "Accept", "application/vnd.kubernetes.protobuf"); a.Code !=
		http.StatusNotAcceptable || strings.Contains(a.Body, "protobuf") {
		r.TB.Fatalf("%d %s", a.Code, a.Body)
	}
	meta := "application/vnd.kubernetes.protobuf;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
	if a := r.Call(c, "GET", GadgetsPath, "", "Accept", meta); a.Code != http.StatusOK ||
		!strings.HasPrefix(a.Body, "k8s\x00") {
		r.TB.Fatalf("%d %s", a.Code, a.Body)
	}
	if a := r.Call(c, "POST", GadgetsPath+"?fieldValidation=Strict", `{"metadata":{"name":"x","nme":"y"}}`); a.Code !=
		http.StatusBadRequest || !strings.Contains(a.Body, `metadata.nme`) {
		r.TB.Fatalf("%d %s", a.Code, a.Body)
	}
	ok(r.Call(c, "DELETE", GadgetsPath+"/"+name, ""))
}

// WatchLines starts a watch. It returns a channel with the lines of the response, which is closed
// when the watch ends, and a function that stops the watch.
func (r *Replica) WatchLines(c *http.Client, path string) (<-chan string, func()) {
	r.TB.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	req, err := http.NewRequestWithContext(ctx, "GET", "https://"+r.Addr+path, nil)
	if err != nil {
		r.TB.Fatal(err)
	}
	resp, err := c.Do(req)
	if err != nil || resp.StatusCode != http.StatusOK {
		r.TB.Fatalf("watching %s: %v %v", path, resp, err)
	}
	lines := make(chan string, 256)
	go func() {
		defer close(lines)
		for s := bufio.NewScanner(resp.Body); s.Scan(); {
			lines <- s.Text()
		}
	}()
	return lines, func() { resp.Body.Close(); cancel() }
}
