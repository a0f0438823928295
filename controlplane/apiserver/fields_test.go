package apiserver_test

import (
	"encoding/json"
	"net/http"
	"reflect"
	"slices"
	"strconv"
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
	"keelson.dev/keelson/controlplane/apiserver/apiservertest"
)

// body is a body that clients send: an object of a kind, or the body of a subresource.
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
		name := k.GVK.Kind
		if k.Conversion != nil { // another kind of this name is stored
			name = k.GVK.GroupKind().String()
		}
		out = append(out, body{name, k, "", func() runtime.Object { return k.Type.New() }, k.Schema.Answers})
		for name, s := range k.Subresources {
			if s.New != nil {
				out = append(out, body{k.Resource + "/" + name, k, name, s.New, s.Answers})
			}
		}
	}
	return out
}

// TestEveryFieldHasAnAnswer is the law that what is accepted is done: each field of each served
// kind is honoured, refused, dropped, inert or stored and said to be, no answer is about a field
// that is gone, and what is called refused is refused by the server with the field's name and its
// sentence.
func TestEveryFieldHasAnAnswer(t *testing.T) {
	all := bodies()
	var of []any
	for _, b := range all {
		of = append(of, b.make())
		if b.answers == nil {
			t.Errorf("%s has no answers", b.name)
			continue
		}
		if b.answers.Stored() != nil && !b.kind.Serving.Virtual && valid[b.name] == "" {
			t.Errorf("%s: there is no valid one, so that the warning of what is stored only was seen", b.name)
		}
		for _, l := range b.answers.Leaves() {
			if l.Answer == nil {
				t.Errorf("%s: nothing says what becomes of %s: answer for it in controlplane/api/fields/answers",
					b.name, l.Path)
			}
		}
	}
	for _, o := range fields.OptionTypes() {
		of = append(of, o)
		for _, l := range fields.LoadTable().AnswersFor(o).Leaves() {
			if l.Answer == nil && l.Path != "kind" && l.Path != "apiVersion" {
				t.Errorf("%T: nothing says what becomes of %s: answer for it in "+
					"controlplane/api/fields/answers/options.txt", o, l.Path)
			}
		}
	}
	for _, s := range fields.LoadTable().UnusedAnswers(of) {
		t.Errorf("an answer about nothing: %s", s)
	}
	if t.Failed() {
		return
	}
	r := apiservertest.StartReplica(t, nil)
	admin := r.AdminHTTP()
	for _, b := range all {
		t.Run(strings.ReplaceAll(b.name, "/", "."), func(t *testing.T) { refusals(t, r, admin, b) })
	}
}

// freeTypes are named types of strings that users choose; which capabilities there are is the
// kernel's to say, and a container with an unknown one does not start. An unknown medium of an
// emptyDir is the node's to refuse, as in Kubernetes.
var freeTypes = []string{"StorageMedium", "UID", "ResourceName", "FinalizerName", "SecretType", "PodConditionType",
	"NodeName", "Capability", "QualifiedName", "FullyQualifiedName"}

// fullPod is a pod specification that is valid with any value of the fields that allow certain
// values only.
const fullPod = `{spec: {os: {name: linux}, volumes: [{name: v, hostPath: {path: /x}}], initContainers: [{name: i, image: i,
  restartPolicy: Always, restartPolicyRules: [{action: Restart, exitCodes: {operator: In, values: [1]}}]}], containers: [{name: c, image: i}]}}`

// ownClaim is where a pod says what claim is made for it, and validOwnClaim such a volume.
const (
	ownClaim      = "spec.volumes[].ephemeral.volumeClaimTemplate."
	validOwnClaim = "ephemeral: {volumeClaimTemplate: {spec: {accessModes: [ReadWriteOnce], resources: {requests: " +
		"{storage: 1Gi}}}}}"
)

// judged reports whether clients set a field and it is not a field of the pod in another place.
func judged(path string) bool {
	for _, prefix := range []string{"status.", "metadata.", "spec.metadata.", ownClaim + "metadata.",
		"spec.template.spec.", "spec.jobTemplate.spec.template.spec."} {
		if strings.HasPrefix(path, prefix) {
			return false
		}
	}
	return true
}

// TestUnknownValuesAreRefused sends, for each honoured or stored field that takes one of some
// values, a value that is none of them: what nobody knows the meaning of is not stored.
func TestUnknownValuesAreRefused(t *testing.T) {
	r := apiservertest.StartReplica(t, nil)
	admin := r.AdminHTTP()
	for _, b := range bodies() {
		text, ok := valid[b.name]
		if !ok || b.sub != "" || b.kind.Serving.Virtual {
			continue
		}
		seen := map[string]bool{}
		for _, l := range b.answers.Leaves() {
			typ := l.Type
			for typ.Kind() == reflect.Pointer || typ.Kind() == reflect.Slice {
				typ = typ.Elem()
			}
			field := typ.String() + l.Field
			if typ.Kind() != reflect.String || typ.PkgPath() == "" ||
				slices.Contains(freeTypes, typ.Name()) || seen[field] ||
				l.Answer == nil || l.Answer.State != fields.Honoured && l.Answer.State != fields.Stored ||
				!judged(l.Path) {
				continue
			}
			seen[field] = true
			obj := b.make()
			if b.name == "Pod" {
				text = fullPod
			}
			if strings.HasPrefix(l.Path, ownClaim) {
				text = strings.Replace(fullPod, "hostPath: {path: /x}", validOwnClaim, 1)
			}
			if err := yaml.Unmarshal([]byte(text), obj); err != nil {
				t.Fatal(err)
			}
			answer := *l.Answer
			answer.Values = []string{"Sometimes"}
			at := l
			// a value's own answer is of the field too
			path := strings.TrimSuffix(l.Path, "="+strings.Join(l.Answer.Values, "|"))
			at.Path, at.Answer = strings.TrimSuffix(path, "[]")+"=Sometimes", &answer
			set(t, reflect.ValueOf(obj).Elem(), at)
			if a := send(t, r, admin, "POST", endpoint(b), b, obj); a.Code != 422 && a.Code != 403 ||
				!strings.Contains(a.Body, "Sometimes") {
				t.Errorf("%s %s (%s): %d %.300s", b.name, l.Path, typ, a.Code, a.Body)
			}
		}
	}
}

const (
	validRule  = "{operations: [CREATE], apiGroups: [''], apiVersions: [v1], resources: [pods]}"
	validMatch = "matchConstraints: {resourceRules: [" + validRule + "]}"
	validHook  = "{webhooks: [{name: a.b.c, sideEffects: None, admissionReviewVersions: [v1], clientConfig: {url: " +
		"'https://a.b'}, rules: [" + validRule + "]}]}"
)

// valid is objects that are accepted. If one more field makes one of them invalid, the field is the
// reason.
var valid = map[string]string{
	"Namespace": "{}",
	"Node":      "{}",
	"Pod":       "{spec: {containers: [{name: c, image: i}]}}",
	"Service":   "{spec: {ports: [{port: 80}]}}",
	"Endpoints": "{}", "ConfigMap": "{}", "Secret": "{}", "ServiceAccount": "{}",
	"Event": "{involvedObject: {namespace: default}}",
	"Event.events.k8s.io": "{eventTime: '2026-01-01T00:00:00.000000Z', reportingController: x.io/y, " +
		"reportingInstance: i, action: a, reason: r, type: Normal, regarding: {namespace: default}}",
	"PersistentVolume":      "{spec: {capacity: {storage: 1Gi}, accessModes: [ReadWriteOnce], hostPath: {path: /x}}}",
	"PersistentVolumeClaim": "{spec: {accessModes: [ReadWriteOnce], resources: {requests: {storage: 1Gi}}}}",
	"Deployment": "{spec: {selector: {matchLabels: {a: b}}, template: {metadata: {labels: {a: b}}, spec: " +
		"{containers: [{name: c, image: i}]}}}}",
	"ReplicaSet": "{spec: {selector: {matchLabels: {a: b}}, template: {metadata: {labels: {a: b}}, spec: " +
		"{containers: [{name: c, image: i}]}}}}",
	"EndpointSlice": "{addressType: IPv4, endpoints: [{addresses: [10.0.0.1]}], ports: []}",
	"Lease":         "{}",
	"StorageClass":  "{provisioner: x.io/y}",
	"CSIDriver":     "{spec: {attachRequired: false}}", "CSINode": "{spec: {drivers: []}}",
	"ValidatingWebhookConfiguration": validHook, "MutatingWebhookConfiguration": validHook,
	"ValidatingAdmissionPolicy": "{spec: {" + validMatch + ", validations: [{expression: 'true'}]}}",
	"MutatingAdmissionPolicy": "{spec: {" + validMatch +
		", mutations: [{patchType: JSONPatch, jsonPatch: {expression: '[]'}}]}}",
	"ValidatingAdmissionPolicyBinding": "{spec: {policyName: p, validationActions: [Deny]}}",
	"MutatingAdmissionPolicyBinding":   "{spec: {policyName: p}}",
	"CertificateSigningRequest": "{spec: {request: " + apiservertest.EncodedCertificateRequest +
		", signerName: x.io/y, usages: [any]}}",
	"ClusterTrustBundle": "{spec: {trustBundle: " + strconv.Quote(apiservertest.ValidCA) + "}}",
	"DeviceClass":        "{spec: {}}",
	"ResourceClaim":      "{spec: {devices: {requests: [{name: r, exactly: {deviceClassName: c}}]}}}",
	"ResourceClaimTemplate": "{spec: {spec: {devices: {requests: [{name: r, exactly: " +
		"{deviceClassName: c}}]}}}}",
	"ResourceSlice": "{spec: {driver: x.io, nodeName: w, pool: {name: p, resourceSliceCount: 1}, " +
		"devices: [{name: d}]}}",
	"FlowSchema":                 "{spec: {priorityLevelConfiguration: {name: l}}}",
	"PriorityLevelConfiguration": "{spec: {type: Limited, limited: {limitResponse: {type: Reject}}}}",
	"CSIStorageCapacity":         "{storageClassName: c}",
	"VolumeAttributesClass":      "{driverName: x.io, parameters: {a: b}}",
	"Ingress": "{spec: {rules: [{host: a.b, http: {paths: [{path: /, pathType: Prefix, " +
		"backend: {service: {name: s, port: {number: 80}}}}]}}]}}",
	"IngressClass":        "{spec: {controller: x.io/y}}",
	"NetworkPolicy":       "{spec: {podSelector: {}, ingress: [{ports: [{port: 80}]}]}}",
	"ServiceCIDR":         "{spec: {cidrs: [10.0.0.0/24]}}",
	"IPAddress":           "{spec: {parentRef: {resource: services, namespace: a, name: b}}}",
	"RuntimeClass":        "{handler: h}",
	"VolumeAttachment":    "{spec: {attacher: x.io, nodeName: n, source: {persistentVolumeName: v}}}",
	"PriorityClass":       "{value: 1, preemptionPolicy: Never}",
	"PodGroup":            "{spec: {schedulingPolicy: {gang: {minCount: 2}}}}",
	"Workload":            "{spec: {podGroupTemplates: [{name: t, schedulingPolicy: {basic: {}}}]}}",
	"PodDisruptionBudget": "{spec: {minAvailable: 1, selector: {}}}",
	"Role":                "{rules: []}", "ClusterRole": "{rules: []}",
	"RoleBinding":        "{roleRef: {kind: Role, name: r}}",
	"ClusterRoleBinding": "{roleRef: {kind: ClusterRole, name: r}}",
	"pods/eviction":      "{}", "pods/binding": "{target: {kind: Node, name: n}}", "serviceaccounts/token": "{}",
}

// refusals sends every refused field of a body.
func refusals(t *testing.T, r *apiservertest.Replica, admin *http.Client, b body) {
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
		if !b.kind.Serving.Virtual && ok {
			a := send(t, r, admin, "POST", path, b, base)
			if a.Code != 201 {
				t.Fatalf("the valid one: %d %s", a.Code, a.Body)
			}
			told := strings.Contains(strings.Join(a.Header.Values("Warning"), "\n"),
				b.kind.GroupResource().String()+": stored; ")
			if told != (b.answers.Stored() != nil) {
				t.Errorf("that it is stored only: told %v, warnings %q", told, a.Header.Values("Warning"))
			}
		}
	case "eviction", "binding":
		if len(refused) > 0 {
			r.Must(apiservertest.NewPod("field"))
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
			obj.(api.Object).SetResourceVersion(r.Must(made).GetResourceVersion())
			method, to = "PUT", path+"/field/status"
		}
		a := send(t, r, admin, method, to, b, obj)
		var s metav1.Status
		if err := json.Unmarshal([]byte(a.Body), &s); err != nil || a.Code != 422 && a.Code != 403 || s.Details == nil {
			t.Errorf("%s: %d %s", l.Path, a.Code, a.Body)
			continue
		}
		if !slices.ContainsFunc(s.Details.Causes, func(c metav1.StatusCause) bool {
			return c.Field == want && strings.HasSuffix(c.Message, l.Answer.Why)
		}) {
			t.Errorf("%s is refused, but not with %s and its sentence: %s", l.Path, want, a.Body)
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

// particularNames is names for the kinds that restrict their names.
var particularNames = map[string]string{"CSIDriver": "field.io", "CSINode": "field.io", "IPAddress": "192.0.2.1"}

func send(
	t *testing.T, r *apiservertest.Replica, c *http.Client, method, path string, b body, obj runtime.Object,
) apiservertest.Response {
	gvk := b.kind.GVK
	if b.sub != "" {
		gvk = b.kind.Subresources[b.sub].GVK
	}
	obj.GetObjectKind().SetGroupVersionKind(gvk)
	if o, ok := obj.(metav1.Object); ok && b.sub != "token" {
		o.SetName("field")
		if name := particularNames[b.kind.GVK.Kind]; name != "" {
			o.SetName(name)
		}
	}
	data, err := json.Marshal(obj)
	if err != nil {
		t.Fatal(err)
	}
	if b.sub == "" {
		path += "?dryRun=All"
	}
	return r.Call(c, method, path, string(data), "Content-Type", "application/json")
}

// set sets the field of a leaf to a value that the leaf describes, and returns the field's path.
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

// enter dereferences a pointer or returns the first element of a list, and creates it if necessary.
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

// setAny sets a value other than zero.
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

// What was stored when it was still accepted may be changed in everything else, but gets no more of
// it.
func TestStoredFieldsAreLetBe(t *testing.T) {
	r := apiservertest.StartReplica(t, nil)
	ctx := apiservertest.Within(t)
	d := &appsv1.Deployment{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "old"}}
	if err := yaml.Unmarshal([]byte(valid["Deployment"]), d); err != nil {
		t.Fatal(err)
	}
	volume := func(name string) corev1.Volume {
		return corev1.Volume{Name: name,
			VolumeSource: corev1.VolumeSource{Glusterfs: &corev1.GlusterfsVolumeSource{EndpointsName: name, Path: "/"}}}
	}
	d.Spec.Template.Spec.Volumes = []corev1.Volume{volume("gpu")}
	deployments := apiservertest.StoreUnvalidated(ctx, r, d)
	was, err := deployments.Get(ctx, "old", metav1.GetOptions{})
	if err != nil || len(was.Spec.Template.Spec.Volumes) != 1 {
		t.Fatal(was, err)
	}
	was.Spec.Template.Spec.Containers[0].Image = "other"
	now, err := deployments.Update(ctx, was, metav1.UpdateOptions{})
	if err != nil {
		t.Fatalf("a change of the image: %v", err)
	}
	now.Spec.Template.Spec.Volumes = append(now.Spec.Template.Spec.Volumes, volume("net"))
	_, err = deployments.Update(ctx, now, metav1.UpdateOptions{})
	if !apierrors.IsInvalid(err) || !strings.Contains(err.Error(), "spec.template.spec.volumes[1].glusterfs") {
		t.Errorf("one more volume: %v", err)
	}
}

// What an older release accepted, and this one knows no meaning of, stops no other change; it is
// not accepted in a new object.
func TestStoredValuesAreLetBe(t *testing.T) {
	r := apiservertest.StartReplica(t, nil)
	ctx := apiservertest.Within(t)
	d := &appsv1.Deployment{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "old",
		Finalizers: []string{"example.com/hold"}}}
	if err := yaml.Unmarshal([]byte(valid["Deployment"]), d); err != nil {
		t.Fatal(err)
	}
	bad := &d.Spec.Template.Spec.Containers[0]
	bad.TerminationMessagePolicy = "Shout"
	deployments := apiservertest.StoreUnvalidated(ctx, r, d)
	was, err := deployments.Get(ctx, "old", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	was.Finalizers, was.Labels = nil, map[string]string{"new": "label"}
	now, err := deployments.Update(ctx, was, metav1.UpdateOptions{})
	if err != nil {
		t.Fatalf("removing a finalizer: %v", err)
	}
	more := now.DeepCopy()
	more.Spec.Template.Spec.Containers = append(more.Spec.Template.Spec.Containers,
		*more.Spec.Template.Spec.Containers[0].DeepCopy())
	more.Spec.Template.Spec.Containers[1].Name = "more"
	_, err = deployments.Update(ctx, more, metav1.UpdateOptions{})
	if !apierrors.IsInvalid(err) || !strings.Contains(err.Error(), "containers[1].terminationMessagePolicy") {
		t.Errorf("one more container with it: %v", err)
	}
	now.Spec.Template.Spec.Containers[0].TerminationMessagePolicy = "Whisper"
	_, err = deployments.Update(ctx, now, metav1.UpdateOptions{})
	if !apierrors.IsInvalid(err) || !strings.Contains(err.Error(), "containers[0].terminationMessagePolicy") {
		t.Errorf("another value without meaning: %v", err)
	}
}

// What Kubernetes gives no effect by itself is accepted, and its client is told.
func TestInertFieldsAreToldOf(t *testing.T) {
	r := apiservertest.StartReplica(t, nil)
	a := r.Call(r.AdminHTTP(), "POST", "/api/v1/namespaces/default/secrets", `{"kind":"Secret","apiVersion":"v1",
		"metadata":{"name":"token"},"type":"bootstrap.kubernetes.io/token"}`, "Content-Type", "application/json")
	said := strings.Join(a.Header.Values("Warning"), "\n")
	if a.Code != 201 ||
		!strings.Contains(said, "type: it authenticates at the API where --enable-bootstrap-token-auth says so") {
		t.Errorf("%d %q", a.Code, said)
	}
}
