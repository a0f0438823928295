package apiserver_test

import (
	"encoding/json"
	"net/http"
	"reflect"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/yaml"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/fields"
	"keelson.dev/keelson/controlplane/apiserver/apiservertest"
)

// Every field that Kubernetes drops is accepted and absent from the created and from the applied
// object and from their managedFields, without a warning.
func TestDroppedFieldsAreAcceptedAndAbsent(t *testing.T) { // F37
	r := apiservertest.StartReplica(t, nil)
	admin := r.AdminHTTP()
	gates, accepted := map[string]bool{}, 0
	for _, b := range bodies() {
		for _, l := range b.answers.Leaves() {
			if l.Answer == nil || l.Answer.State != fields.Dropped || b.sub != "" {
				continue
			}
			gates[l.Answer.Gate] = true
			if strings.HasPrefix(l.Path, "status.") && b.kind.Subresources["status"] != nil {
				dropFromStatus(t, r, admin, b, l)
				continue
			}
			for _, verb := range []string{"POST", "PATCH"} {
				obj := validBody(t, b)
				setDropped(t, obj, l)
				if checkGone(t, r, admin, verb, endpoint(b), b, obj, l) {
					accepted++
				}
			}
		}
	}
	if len(gates) < 15 || accepted < 100 {
		t.Errorf("%d requests were accepted; the dropped fields belong to the gates %v", accepted, gates)
	}
}

func validBody(t *testing.T, b body) runtime.Object {
	t.Helper()
	obj := b.make()
	text, ok := valid[b.name]
	if more := droppable[b.name]; more != "" {
		text, ok = more, true
	}
	if !ok {
		t.Fatalf("there is no valid %s to start from", b.name)
	}
	if err := yaml.Unmarshal([]byte(text), obj); err != nil {
		t.Fatal(err)
	}
	return obj
}

// podOfAll is a pod specification in which each type of a dropped field can be set without another
// error.
const podOfAll = `{containers: [{name: c, image: i}], initContainers: [{name: i, image: i, restartPolicy: Always}], ` +
	`volumes: [{name: v}]}`

// droppable is valid objects of the kinds that are missing in the table valid.
var droppable = map[string]string{
	"Pod":         "{spec: " + podOfAll + "}",
	"PodTemplate": "{template: {spec: " + podOfAll + "}}",
	"ReplicationController": "{spec: {selector: {a: b}, template: {metadata: {labels: {a: b}}, spec: " +
		podOfAll + "}}}",
	"Deployment": "{spec: {selector: {matchLabels: {a: b}}, template: {metadata: {labels: {a: b}}, spec: " +
		podOfAll + "}}}",
	"ReplicaSet": "{spec: {selector: {matchLabels: {a: b}}, template: {metadata: {labels: {a: b}}, spec: " +
		podOfAll + "}}}",
	"StatefulSet": "{spec: {serviceName: s, selector: {matchLabels: {a: b}}, template: {metadata: {labels: " +
		"{a: b}}, spec: " + podOfAll + "}}}",
	"DaemonSet": "{spec: {selector: {matchLabels: {a: b}}, template: {metadata: {labels: {a: b}}, spec: " +
		podOfAll + "}}}",
	"Job": "{spec: {template: {spec: " +
		strings.Replace(podOfAll, "{", "{restartPolicy: Never, ", 1) + "}}}",
	"CronJob": "{spec: {schedule: '0 0 * * *', jobTemplate: {spec: {template: {spec: " +
		strings.Replace(podOfAll, "{", "{restartPolicy: Never, ", 1) + "}}}}}",
}

// setDropped sets the field of a leaf. The rest of its parents may then be incomplete, as in a
// volume without a path.
func setDropped(t *testing.T, obj runtime.Object, l fields.Leaf) {
	t.Helper()
	l.Path = strings.TrimSuffix(l.Path, "[]")
	set(t, reflect.ValueOf(obj).Elem(), l)
}

// checkGone sends an object with a dropped field. The response may be an error about another field.
func checkGone(
	t *testing.T, r *apiservertest.Replica, admin *http.Client, verb, path string, b body,
	obj runtime.Object, l fields.Leaf,
) (accepted bool) {
	t.Helper()
	a := sendAs(t, r, admin, verb, path, b, obj)
	name := l.Path[strings.LastIndex(l.Path, ".")+1:]
	if a.Code/100 == 2 {
		if strings.Contains(a.Body, `"`+name+`"`) && !isElsewhere(name, a.Body) ||
			strings.Contains(a.Body, `"f:`+name+`"`) && name != alwaysShown {
			t.Errorf("%s %s of %s: the response has the field: %.1600s", verb, l.Path, b.name, a.Body)
		}
		if w := a.Header.Values("Warning"); len(w) > 0 && strings.Contains(strings.Join(w, " "), name) {
			t.Errorf("%s %s of %s: warnings %q", verb, l.Path, b.name, w)
		}
		return true
	}
	if a.Code != http.StatusUnprocessableEntity || strings.Contains(a.Body, "."+name) {
		t.Errorf("%s %s of %s: %d %.600s", verb, l.Path, b.name, a.Code, a.Body)
	}
	return false
}

// alwaysShown is a dropped field that the JSON of its type contains even if it is empty.
const alwaysShown = "schedulingConstraints"

// isElsewhere reports whether a response has another field with the name of a dropped field, or the
// field as null.
func isElsewhere(name, body string) bool {
	others := map[string]string{"protocol": `"protocol":"TCP"`, alwaysShown: `"schedulingConstraints":null`}
	return others[name] != "" && strings.Contains(body, others[name])
}

// sendAs sends an object as a dry run: created by POST, applied by PATCH.
func sendAs(
	t *testing.T, r *apiservertest.Replica, c *http.Client, verb, path string, b body, obj runtime.Object,
) apiservertest.Response {
	t.Helper()
	if verb == "POST" || verb == "PUT" {
		return send(t, r, c, verb, path, b, obj)
	}
	obj.GetObjectKind().SetGroupVersionKind(b.kind.GVK)
	name := "applied"
	if fixed := particularNames[b.kind.GVK.Kind]; fixed != "" {
		name = fixed
	}
	obj.(api.Object).SetName(name)
	data, err := json.Marshal(obj)
	if err != nil {
		t.Fatal(err)
	}
	return r.Call(c, verb, path+"/"+name+"?dryRun=All&fieldManager=me", string(data), "Content-Type",
		"application/apply-patch+yaml")
}

// dropFromStatus updates the status of an object with a dropped field.
func dropFromStatus(t *testing.T, r *apiservertest.Replica, admin *http.Client, b body, l fields.Leaf) {
	t.Helper()
	obj := validBody(t, b)
	made := obj.DeepCopyObject().(api.Object)
	name := "field"
	if fixed := particularNames[b.kind.GVK.Kind]; fixed != "" {
		name = fixed
	}
	path := endpoint(b) + "/" + name
	if r.Call(admin, "GET", path, "").Code == http.StatusNotFound {
		made.SetName(name)
		if b.kind.Namespaced {
			made.SetNamespace("default")
		}
		r.Must(made)
	}
	setDropped(t, obj, l)
	checkGone(t, r, admin, "PUT", path+"/status", b, obj, l)
}

// A list that asks for a shard returns all objects, as in Kubernetes without ShardedListAndWatch.
func TestShardSelectorIsIgnored(t *testing.T) { // F72
	r := apiservertest.StartReplica(t, nil)
	a := r.Call(r.AdminHTTP(), "GET",
		"/api/v1/namespaces/default/serviceaccounts?shardSelector=shardRange(object.metadata.uid,'0x0','0x8')", "")
	if a.Code != http.StatusOK || !strings.Contains(a.Body, `"name":"default"`) ||
		strings.Contains(a.Body, "shardInfo") {
		t.Errorf("%d %s", a.Code, a.Body)
	}
}
