package apiserver

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"net/http"
	"os"
	"strings"
	"testing"
	"time"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/controllers"
	"keelson.dev/keelson/controlplane/controllers/customresourcedefinition"
	"keelson.dev/keelson/internal/wait"
)

const definitionsPath = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"

// withDefinitions starts a replica with the controller of definitions.
func withDefinitions(t testing.TB) *replica {
	t.Helper()
	r := start(t, nil)
	r.leadDefinitions()
	return r
}

// leadDefinitions runs the controller of definitions until the test ends.
func (r *replica) leadDefinitions() {
	r.lead(customresourcedefinition.New)
}

// lead runs controllers until the test ends.
func (r *replica) lead(news ...func(controllers.Deps) *controllers.Controller) *client.Informers {
	c := client.New(r.Backend(), r.cfg.Kinds)
	informers := client.NewInformers(c.As(api.User{Name: api.UserAPIServer, Groups: []string{api.GroupMasters}}))
	d := controllers.Deps{Client: c, Informers: informers, Replica: "test",
		Log: slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelError}))}
	var all []*controllers.Controller
	for _, n := range news {
		all = append(all, n(d))
	}
	engine := controllers.NewEngine(d, controllers.Options{}, all...)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{}, 2)
	go func() { _ = informers.Run(ctx); done <- struct{}{} }()
	if err := informers.WaitForSync(ctx); err != nil {
		r.t.Fatal(err)
	}
	go func() { _ = engine.Run(ctx, 0); done <- struct{}{} }()
	r.t.Cleanup(func() { cancel(); <-done; <-done })
	return informers
}

// ok fails the test unless the response is a success that contains the texts.
func (r *replica) ok(a answer, want ...string) answer {
	r.t.Helper()
	if a.code/100 != 2 {
		r.t.Fatalf("%d %s", a.code, a.body)
	}
	for _, w := range want {
		if !strings.Contains(a.body, w) {
			r.t.Fatalf("no %s in %s", w, a.body)
		}
	}
	return a
}

// refused fails the test unless the response has the code and contains the texts.
func (r *replica) refused(a answer, code int, want ...string) {
	r.t.Helper()
	if a.code != code {
		r.t.Fatalf("%d, not %d: %s", a.code, code, a.body)
	}
	var s struct{ Message string }
	_ = json.Unmarshal([]byte(a.body), &s)
	for _, w := range want {
		if !strings.Contains(s.Message, w) {
			r.t.Fatalf("no %s in %s", w, a.body)
		}
	}
}

// establish creates a definition and waits until it is established.
func (r *replica) establish(c *http.Client, definition string) {
	r.t.Helper()
	a := r.ok(r.call(c, "POST", definitionsPath, definition, "Content-Type", "application/yaml"))
	var made struct{ Metadata struct{ Name string } }
	if err := json.Unmarshal([]byte(a.body), &made); err != nil {
		r.t.Fatal(err)
	}
	r.condition(c, made.Metadata.Name, "Established", "True")
}

// condition waits until a condition of a definition has a status.
func (r *replica) condition(c *http.Client, name, of, status string) (reason, message string) {
	r.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	var last string
	err := wait.For(ctx, 2*time.Millisecond, func() error {
		last = r.ok(r.call(c, "GET", definitionsPath+"/"+name, "")).body
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
		return errNotYet
	})
	if err != nil {
		r.t.Fatalf("%s of %s is not %s: %s", of, name, status, last)
	}
	return reason, message
}

var errNotYet = context.DeadlineExceeded

const crontabs = `
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

const crontabsPath = "/apis/stable.example.com/v1/namespaces/default/crontabs"

func crontab(name, spec string) string {
	return `{"apiVersion":"stable.example.com/v1","kind":"CronTab","metadata":{"name":"` + name + `"},"spec":` + spec + `}`
}

// F15: a definition that is created is a kind a moment later: its objects are validated, pruned, defaulted, listed as
// its columns say and watched; a definition that is deleted takes them along.
func TestCustomResources(t *testing.T) {
	r := withDefinitions(t)
	c := r.adminHTTP()
	r.establish(c, crontabs)
	json := []string{"Content-Type", "application/json"}

	lines, done := r.watchLines(c, crontabsPath+"?watch=1")
	r.ok(r.call(c, "POST", crontabsPath+"?fieldValidation=Ignore", crontab("a", `{"cronSpec":"* * * * */5","bogus":1,"ports":[{"name":"x"}]}`), json...),
		`"image":"busybox"`, `"replicas":1`, `"number":80`, `"generation":1`)
	if got := r.ok(r.call(c, "GET", crontabsPath+"/a", "")).body; strings.Contains(got, "bogus") {
		t.Fatalf("an unknown field is stored: %s", got)
	}
	if first := <-lines; !strings.Contains(first, `"ADDED"`) || !strings.Contains(first, "busybox") {
		t.Fatalf("the watch shows %s", first)
	}
	done()
	r.refused(r.call(c, "POST", crontabsPath+"?fieldValidation=Strict", crontab("b", `{"cronSpec":"* * * * *","bogus":1}`), json...),
		400, `unknown field "spec.bogus"`)
	if a := r.ok(r.call(c, "POST", crontabsPath, crontab("warned", `{"cronSpec":"* * * * *","bogus":1}`), json...)); !strings.Contains(a.header.Get("Warning"), `unknown field \"spec.bogus\"`) {
		t.Fatalf("warnings are %q", a.header.Get("Warning"))
	}
	table := r.ok(r.call(c, "GET", crontabsPath, "", "Accept", "application/json;as=Table;g=meta.k8s.io;v=v1")).body
	for _, want := range []string{`"name":"Spec"`, `"cells":["a","* * * * */5",1,"x","`} {
		if !strings.Contains(table, want) {
			t.Errorf("no %s in the table %s", want, table)
		}
	}
	if got := r.ok(r.call(c, "GET", crontabsPath+"?fieldSelector=spec.image%3Dbusybox", ""), `"name":"a"`); strings.Contains(
		r.ok(r.call(c, "GET", crontabsPath+"?fieldSelector=spec.image%3Dother", "")).body, `"name":"a"`) {
		t.Errorf("selected: %s", got.body)
	}

	r.ok(r.call(c, "DELETE", definitionsPath+"/crontabs.stable.example.com", ""))
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	if err := wait.For(ctx, 5*time.Millisecond, func() error {
		if a := r.call(c, "GET", definitionsPath+"/crontabs.stable.example.com", ""); a.code != 404 {
			return errNotYet
		}
		return nil
	}); err != nil {
		t.Fatal("the definition does not go")
	}
	eventually(t, func() error { // the server hears of it a moment after the store
		if a := r.call(c, "GET", crontabsPath, ""); a.code != 404 {
			return fmt.Errorf("its objects are served still: %d %s", a.code, a.body)
		}
		return nil
	})
	r.establish(c, crontabs)
	if left := r.ok(r.call(c, "GET", crontabsPath, "")).body; strings.Contains(left, `"name":"a"`) {
		t.Errorf("objects outlived their definition: %s", left)
	}
}
