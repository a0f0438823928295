package apiserver

import (
	"context"
	"encoding/json"
	"net/http"
	"reflect"
	"slices"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/yaml"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/fields"
	"keelson.dev/keelson/controlplane/api/kinds"
	"keelson.dev/keelson/controlplane/registry"
)

// body is something that clients send: a kind, or the body of a subresource.
type body struct {
	name    string // "Pod", "pods/eviction"
	kind    *api.Kind
	sub     string
	make    func() runtime.Object
	answers *fields.Answers
}

func bodies() []body {
	var out []body
	for _, k := range kinds.All().All() {
		out = append(out, body{k.GVK.Kind, k, "", func() runtime.Object { return k.New() }, k.Answers})
		for name, s := range k.Subresources {
			if s.New != nil {
				out = append(out, body{k.Resource + "/" + name, k, name, s.New, s.Answers})
			}
		}
	}
	return out
}

// TestEveryFieldHasAnAnswer is the law that what is accepted is done: each field of each served kind is honoured,
// refused or inert, no answer is about a field that is gone, and what is called refused is refused by the server
// with the field's name and its sentence.
func TestEveryFieldHasAnAnswer(t *testing.T) {
	all := bodies()
	var of []any
	for _, b := range all {
		of = append(of, b.make())
		if b.answers == nil {
			t.Errorf("%s has no answers", b.name)
			continue
		}
		for _, l := range b.answers.Leaves() {
			if l.Answer == nil {
				t.Errorf("%s: nothing says what becomes of %s: answer for it in controlplane/api/fields/answers", b.name, l.Path)
			}
		}
	}
	for _, s := range fields.Load().Stale(of) {
		t.Errorf("an answer about nothing: %s", s)
	}
	if t.Failed() {
		return
	}
	r := start(t, nil)
	admin := r.adminHTTP()
	for _, b := range all {
		t.Run(strings.ReplaceAll(b.name, "/", "."), func(t *testing.T) { refusals(t, r, admin, b) })
	}
}

// valid are objects that are accepted: what is refused with one more field is refused for that field.
var valid = map[string]string{
	"Namespace": "{}",
	"Node":      "{}",
	"Pod":       "{spec: {containers: [{name: c, image: i}]}}",
	"Service":   "{spec: {ports: [{port: 80}]}}",
	"Endpoints": "{}", "ConfigMap": "{}", "Secret": "{}", "ServiceAccount": "{}", "Event": "{involvedObject: {namespace: default}}",
	"PersistentVolume":      "{spec: {capacity: {storage: 1Gi}, accessModes: [ReadWriteOnce], hostPath: {path: /x}}}",
	"PersistentVolumeClaim": "{spec: {accessModes: [ReadWriteOnce], resources: {requests: {storage: 1Gi}}}}",
	"Deployment":            "{spec: {selector: {matchLabels: {a: b}}, template: {metadata: {labels: {a: b}}, spec: {containers: [{name: c, image: i}]}}}}",
	"ReplicaSet":            "{spec: {selector: {matchLabels: {a: b}}, template: {metadata: {labels: {a: b}}, spec: {containers: [{name: c, image: i}]}}}}",
	"EndpointSlice":         "{addressType: IPv4, endpoints: [{addresses: [10.0.0.1]}], ports: []}",
	"Lease":                 "{}",
	"StorageClass":          "{provisioner: x.io/y}",
	"CSIDriver":             "{spec: {attachRequired: false}}", "CSINode": "{spec: {drivers: []}}",
	"VolumeAttachment":    "{spec: {attacher: x.io, nodeName: n, source: {persistentVolumeName: v}}}",
	"PriorityClass":       "{value: 1, preemptionPolicy: Never}",
	"PodDisruptionBudget": "{spec: {minAvailable: 1, selector: {}}}",
	"Role":                "{rules: []}", "ClusterRole": "{rules: []}",
	"RoleBinding":        "{roleRef: {kind: Role, name: r}}",
	"ClusterRoleBinding": "{roleRef: {kind: ClusterRole, name: r}}",
	"pods/eviction":      "{}", "pods/binding": "{target: {kind: Node, name: n}}", "serviceaccounts/token": "{}",
}

// refusals sends every refused field of a body.
func refusals(t *testing.T, r *replica, admin *http.Client, b body) {
	var refused []fields.Leaf
	for _, l := range b.answers.Leaves() {
		if l.Answer.State == fields.Refused {
			refused = append(refused, l)
		}
	}
	base := b.make()
	text, ok := valid[b.name]
	if !ok && len(refused) > 0 {
		t.Fatalf("there is no valid %s to begin from", b.name)
	}
	if err := yaml.Unmarshal([]byte(text), base); err != nil {
		t.Fatal(err)
	}
	path := endpoint(b)
	switch b.sub {
	case "":
		if !b.kind.Virtual && ok {
			if a := send(t, r, admin, "POST", path, b, base); a.code != 201 {
				t.Fatalf("the valid one: %d %s", a.code, a.body)
			}
		}
	case "eviction", "binding":
		if len(refused) > 0 {
			r.must(newPod("field"))
		}
	}
	for _, l := range refused {
		obj := base.DeepCopyObject()
		want := set(t, reflect.ValueOf(obj).Elem(), l)
		method, to := "POST", path
		if strings.HasPrefix(want, "status.") {
			made := base.DeepCopyObject().(api.Object)
			made.SetName("field")
			made.SetNamespace("default")
			obj.(api.Object).SetResourceVersion(r.must(made).GetResourceVersion())
			method, to = "PUT", path+"/field/status"
		}
		a := send(t, r, admin, method, to, b, obj)
		var s metav1.Status
		if err := json.Unmarshal([]byte(a.body), &s); err != nil || a.code != 422 && a.code != 403 || s.Details == nil {
			t.Errorf("%s: %d %s", l.Path, a.code, a.body)
			continue
		}
		if !slices.ContainsFunc(s.Details.Causes, func(c metav1.StatusCause) bool {
			return c.Field == want && strings.HasSuffix(c.Message, l.Answer.Why)
		}) {
			t.Errorf("%s is refused, but not with %s and its sentence: %s", l.Path, want, a.body)
		}
	}
}

func endpoint(b body) string {
	path := "/apis/" + b.kind.GVK.Group + "/" + b.kind.GVK.Version
	if b.kind.GVK.Group == "" {
		path = "/api/" + b.kind.GVK.Version
	}
	if b.kind.Namespaced {
		path += "/namespaces/default"
	}
	path += "/" + b.kind.Resource
	switch {
	case b.sub == "token":
		path += "/default/token"
	case b.sub != "":
		path += "/field/" + b.sub
	}
	return path
}

func send(t *testing.T, r *replica, c *http.Client, method, path string, b body, obj runtime.Object) answer {
	gvk := b.kind.GVK
	if b.sub != "" {
		gvk = b.kind.Subresources[b.sub].GVK
	}
	obj.GetObjectKind().SetGroupVersionKind(gvk)
	if o, ok := obj.(metav1.Object); ok && b.sub != "token" {
		o.SetName("field")
		if b.kind.GVK.Kind == "CSIDriver" || b.kind.GVK.Kind == "CSINode" {
			o.SetName("field.io")
		}
	}
	data, err := json.Marshal(obj)
	if err != nil {
		t.Fatal(err)
	}
	if b.sub == "" {
		path += "?dryRun=All"
	}
	return r.call(c, method, path, string(data), "Content-Type", "application/json")
}

// set makes an object have the field of a leaf, with a value that the leaf is about, and returns the path of what was set.
func set(t *testing.T, v reflect.Value, l fields.Leaf) string {
	path, key, keyed := strings.Cut(strings.ReplaceAll(l.Path, "[].", "."), "[")
	value := "x"
	if l.Answer.Values != nil {
		value = strings.ReplaceAll(l.Answer.Values[0], "*", "x")
	}
	if keyed {
		key, _, _ = strings.Cut(key, "]")
		key = strings.ReplaceAll(key, "*", "x")
	} else if l.Answer.Values != nil {
		path = strings.TrimSuffix(path, "="+strings.Join(l.Answer.Values, "|"))
	}
	var shown []string
	for _, name := range strings.Split(path, ".") {
		for v.Kind() != reflect.Struct {
			v = enter(v, &shown)
		}
		v = fieldNamed(v, name)
		if !v.IsValid() {
			t.Fatalf("%s: there is no %s", l.Path, name)
		}
		shown = append(shown, name)
	}
	if keyed {
		v.Set(reflect.MakeMap(v.Type()))
		v.SetMapIndex(reflect.ValueOf(key), reflect.ValueOf(value))
		return strings.Join(shown, ".") + "[" + key + "]"
	}
	if l.Answer.Values != nil && v.Kind() == reflect.Slice {
		v.Set(reflect.MakeSlice(v.Type(), 1, 1))
		v = v.Index(0)
		shown[len(shown)-1] += "[0]"
	}
	setAny(v, value)
	return strings.Join(shown, ".")
}

// enter goes behind a pointer, or into the first element of a list.
func enter(v reflect.Value, shown *[]string) reflect.Value {
	if v.Kind() == reflect.Pointer {
		if v.IsNil() {
			v.Set(reflect.New(v.Type().Elem()))
		}
		return v.Elem()
	}
	if v.Len() == 0 {
		v.Set(reflect.MakeSlice(v.Type(), 1, 1))
	}
	(*shown)[len(*shown)-1] += "[0]"
	return v.Index(0)
}

func fieldNamed(v reflect.Value, name string) reflect.Value {
	for i := range v.NumField() {
		f := v.Type().Field(i)
		switch tag, _, _ := strings.Cut(f.Tag.Get("json"), ","); {
		case tag == name:
			return v.Field(i)
		case tag == "" && f.Anonymous:
			if found := fieldNamed(v.Field(i), name); found.IsValid() {
				return found
			}
		}
	}
	return reflect.Value{}
}

// setAny sets a value that is not zero.
func setAny(v reflect.Value, text string) {
	switch v.Kind() {
	case reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
		setAny(v.Elem(), text)
	case reflect.String:
		v.SetString(text)
	case reflect.Bool:
		v.SetBool(text != "false")
	case reflect.Int32, reflect.Int64:
		v.SetInt(1)
	case reflect.Slice:
		v.Set(reflect.MakeSlice(v.Type(), 1, 1))
		setAny(v.Index(0), text)
	case reflect.Map:
		v.Set(reflect.MakeMap(v.Type()))
		e := reflect.New(v.Type().Elem()).Elem()
		setAny(e, text)
		v.SetMapIndex(reflect.ValueOf("x").Convert(v.Type().Key()), e)
	}
}

// What was stored when it was still accepted may be changed in everything else, but gets no more of it.
func TestStoredFieldsAreLetBe(t *testing.T) {
	r := start(t, nil)
	ctx := within(t)
	d := &appsv1.Deployment{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "old"}}
	if err := yaml.Unmarshal([]byte(valid["Deployment"]), d); err != nil {
		t.Fatal(err)
	}
	spread := func(key string) corev1.TopologySpreadConstraint {
		return corev1.TopologySpreadConstraint{MaxSkew: 1, TopologyKey: key, WhenUnsatisfiable: corev1.DoNotSchedule}
	}
	d.Spec.Template.Spec.TopologySpreadConstraints = []corev1.TopologySpreadConstraint{spread("zone")}
	kind := r.known.byName["deployments"]
	kind.Default(d)
	accept := registry.AdmissionFunc(func(context.Context, *api.Request, api.Object, api.Object) error { return nil })
	if _, err := r.registry.Create(ctx, &api.Request{User: itself(), Verb: api.VerbCreate, Kind: kind, Namespace: "default", Object: d}, accept); err != nil {
		t.Fatal(err)
	}
	deployments := r.admin().AppsV1().Deployments("default")
	was, err := deployments.Get(ctx, "old", metav1.GetOptions{})
	if err != nil || len(was.Spec.Template.Spec.TopologySpreadConstraints) != 1 {
		t.Fatal(was, err)
	}
	was.Spec.Template.Spec.Containers[0].Image = "other"
	now, err := deployments.Update(ctx, was, metav1.UpdateOptions{})
	if err != nil {
		t.Fatalf("a change of the image: %v", err)
	}
	now.Spec.Template.Spec.TopologySpreadConstraints = append(now.Spec.Template.Spec.TopologySpreadConstraints, spread("host"))
	_, err = deployments.Update(ctx, now, metav1.UpdateOptions{})
	if !apierrors.IsInvalid(err) || !strings.Contains(err.Error(), "spec.template.spec.topologySpreadConstraints") {
		t.Errorf("one more constraint: %v", err)
	}
}

// What Kubernetes gives no effect by itself is accepted, and its client is told.
func TestInertFieldsAreToldOf(t *testing.T) {
	r := start(t, nil)
	a := r.call(r.adminHTTP(), "POST", "/api/v1/namespaces/default/services", `{"kind":"Service","apiVersion":"v1",
		"metadata":{"name":"lb"},"spec":{"type":"LoadBalancer","ports":[{"port":80}]}}`, "Content-Type", "application/json")
	said := strings.Join(a.header.Values("Warning"), "\n")
	if a.code != 201 || !strings.Contains(said, "spec.type: Kubernetes leaves load balancers to a controller") {
		t.Errorf("%d %q", a.code, said)
	}
}
