package admission_test

import (
	"context"
	"fmt"
	"net/http"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	autoscalingv1 "k8s.io/api/autoscaling/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/apiserver"
	"keelson.dev/keelson/controlplane/apiserver/admission"
	"keelson.dev/keelson/controlplane/apiserver/apiservertest"
)

// witness is a plugin that records the attempts of one user.
type witness struct {
	mu   sync.Mutex
	seen []string
}

func (j *witness) plugin(name string) admission.Plugin {
	return admission.Plugin{Name: name, Admit: func(_ context.Context, a *api.Attempt) error {
		if a.User.Name != "admin" {
			return nil
		}
		kind := func(o any) string {
			if o == nil {
				return "-"
			}
			return strings.TrimPrefix(reflect.TypeOf(o).String(), "*")
		}
		whole, stored := "-", "-"
		if a.Whole != nil {
			whole = kind(a.Whole)
		}
		if a.Stored != nil {
			stored = kind(a.Stored)
		}
		options := "-"
		if o := a.Options(); o != nil {
			options = kind(o)
		}
		resource := a.Kind.Resource
		if a.Facet != "" {
			resource += "/" + a.Facet
		}
		j.mu.Lock()
		defer j.mu.Unlock()
		j.seen = append(j.seen, fmt.Sprintf("%s %s %s %s whole=%s stored=%s %s dry=%v %s",
			a.Operation, resource, kind(a.Object), kind(a.OldObject), whole, stored, options, a.DryRun,
			a.BodyKind().Kind))
		return nil
	}}
}

func (j *witness) take() []string {
	j.mu.Lock()
	defer j.mu.Unlock()
	out := j.seen
	j.seen = nil
	return out
}

const admissionGetsTheAttemptPods, admissionGetsTheAttemptDeployments = "/api/v1/namespaces/default/pods",
	"/apis/apps/v1/namespaces/default/deployments"

const admissionGetsTheAttemptJsonType, admissionGetsTheAttemptMerge, admissionGetsTheAttemptApply = "application/json",
	"application/merge-patch+json", "application/apply-patch+yaml"

var admissionGetsTheAttemptDeployment = `{"apiVersion":"apps/v1","kind":"Deployment","metadata":{"name":"d"},"spec":{"selector":{"matchLabels":{"a":"b"}},
		"template":{"metadata":{"labels":{"a":"b"}},"spec":{"containers":[{"name":"c","image":"i"}]}}}}`

func admissionGetsTheAttemptCm(name string) string {
	return `{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"` + name + `"}}`
}

const admissionGetsTheAttemptDep, admissionGetsTheAttemptCms = "v1.Deployment", "/api/v1/namespaces/default/configmaps"

// admissionGetsTheAttemptCases are the cases of TestAdmissionGetsTheAttempt.
var admissionGetsTheAttemptCases = []struct {
	method, path, media, body string
	want                      []string
}{
	{"POST", admissionGetsTheAttemptDeployments, admissionGetsTheAttemptJsonType, admissionGetsTheAttemptDeployment,
		[]string{"CREATE deployments v1.Deployment - whole=v1.Deployment stored=- v1.CreateOptions " +
			"dry=false Deployment"}},
	{"PATCH", admissionGetsTheAttemptDeployments + "/d", admissionGetsTheAttemptMerge,
		`{"metadata":{"labels":{"x":"y"}}}`,
		[]string{"UPDATE deployments v1.Deployment v1.Deployment whole=v1.Deployment stored=v1.Deployment " +
			"v1.UpdateOptions dry=false Deployment"}},
	{"PATCH", admissionGetsTheAttemptDeployments + "/d/status", admissionGetsTheAttemptMerge,
		`{"status":{"replicas":1}}`,
		[]string{"UPDATE deployments/status v1.Deployment v1.Deployment whole=v1.Deployment stored=v1.Deployment " +
			"v1.UpdateOptions dry=false Deployment"}},
	{"PUT", admissionGetsTheAttemptDeployments + "/d/scale?dryRun=All", admissionGetsTheAttemptJsonType,
		`{"apiVersion":"autoscaling/v1","kind":"Scale","metadata":{"name":"d"},"spec":{"replicas":2}}`,
		[]string{"UPDATE deployments/scale v1.Scale v1.Scale whole=v1.Deployment stored=v1.Deployment " +
			"v1.UpdateOptions dry=true Scale"}},
	{"PATCH", admissionGetsTheAttemptDeployments + "/d/scale", admissionGetsTheAttemptMerge, `{"spec":{"replicas":3}}`,
		[]string{"UPDATE deployments/scale v1.Scale v1.Scale whole=v1.Deployment stored=v1.Deployment " +
			"v1.UpdateOptions dry=false Scale"}},
	{"PATCH", admissionGetsTheAttemptDeployments + "/d/scale?fieldManager=m&force=true", admissionGetsTheAttemptApply,
		`{"apiVersion":"autoscaling/v1","kind":"Scale","metadata":{"name":"d"},"spec":{"replicas":4}}`,
		[]string{"UPDATE deployments/scale v1.Scale v1.Scale whole=v1.Deployment stored=v1.Deployment " +
			"v1.UpdateOptions dry=false Scale"}},
	{"PATCH", admissionGetsTheAttemptCms + "/new?fieldManager=m", admissionGetsTheAttemptApply,
		admissionGetsTheAttemptCm("new"),
		[]string{"CREATE configmaps v1.ConfigMap - whole=v1.ConfigMap stored=- v1.CreateOptions " +
			"dry=false ConfigMap"}},
	{"POST", admissionGetsTheAttemptPods + "/a/binding", admissionGetsTheAttemptJsonType,
		`{"apiVersion":"v1","kind":"Binding","metadata":{"name":"a"},"target":{"kind":"Node","name":"n"}}`,
		[]string{"CREATE pods/binding v1.Binding - whole=v1.Pod stored=v1.Pod v1.CreateOptions dry=false Binding"}},
	{"POST", admissionGetsTheAttemptPods + "/gone/eviction", admissionGetsTheAttemptJsonType,
		`{"apiVersion":"policy/v1","kind":"Eviction","metadata":{"name":"gone"}}`,
		[]string{"CREATE pods/eviction v1.Eviction - whole=- stored=v1.Pod v1.CreateOptions dry=false Eviction"}},
	{"POST", "/api/v1/namespaces/default/serviceaccounts/default/token", admissionGetsTheAttemptJsonType,
		`{"apiVersion":"authentication.k8s.io/v1","kind":"TokenRequest","spec":{}}`,
		[]string{"CREATE serviceaccounts/token v1.TokenRequest - whole=- stored=v1.ServiceAccount " +
			"v1.CreateOptions dry=false TokenRequest"}},
	{"POST", "/apis/authentication.k8s.io/v1/tokenreviews", admissionGetsTheAttemptJsonType,
		`{"apiVersion":"authentication.k8s.io/v1","kind":"TokenReview","spec":{"token":"x"}}`,
		[]string{"CREATE tokenreviews v1.TokenReview - whole=- stored=- v1.CreateOptions dry=false TokenReview"}},
	{"POST", "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", admissionGetsTheAttemptJsonType,
		`{"apiVersion":"authorization.k8s.io/v1","kind":"SelfSubjectAccessReview",` +
			`"spec":{"nonResourceAttributes":{"path":"/","verb":"get"}}}`,
		[]string{"CREATE selfsubjectaccessreviews v1.SelfSubjectAccessReview - whole=- stored=- v1.CreateOptions " +
			"dry=false SelfSubjectAccessReview"}},
	{"POST", admissionGetsTheAttemptPods + "/b/exec?command=ls&stdout=true", "", "",
		[]string{"CONNECT pods/exec v1.PodExecOptions - whole=- stored=v1.Pod - dry=false PodExecOptions"}},
	{"GET", admissionGetsTheAttemptPods + "/b/attach?stdout=true", "", "",
		[]string{"CONNECT pods/attach v1.PodAttachOptions - whole=- stored=v1.Pod - dry=false PodAttachOptions"}},
	{"POST", admissionGetsTheAttemptPods + "/b/portforward?ports=80", "", "",
		[]string{"CONNECT pods/portforward v1.PodPortForwardOptions - whole=- stored=v1.Pod - dry=false " +
			"PodPortForwardOptions"}},
	{"GET", admissionGetsTheAttemptPods + "/b/log", "", "", nil},
	{"GET", admissionGetsTheAttemptPods + "/b", "", "", nil},
	{"DELETE", admissionGetsTheAttemptCms + "/new?dryRun=All", "", "",
		[]string{"DELETE configmaps - v1.ConfigMap whole=- stored=v1.ConfigMap v1.DeleteOptions " +
			"dry=true ConfigMap"}},
	{"DELETE", admissionGetsTheAttemptCms + "?fieldSelector=metadata.name=new", "", "",
		[]string{"DELETE configmaps - v1.ConfigMap whole=- stored=v1.ConfigMap v1.DeleteOptions " +
			"dry=false ConfigMap"}},
}

// Admission receives each attempt with the body of its subresource, the stored object in the same
// form, and the options of the operation. It also receives connect requests and creations of
// virtual kinds. Reading a log is not admitted.
func TestAdmissionGetsTheAttempt(t *testing.T) {
	var j witness
	r := apiservertest.StartReplica(t, func(c *apiserver.Config) {
		c.Outbound.Streams = &apiservertest.FakeNode{}
		c.Admission.Validators = admission.Validators{{Name: "journal",
			Plugins: []admission.Plugin{j.plugin("journal")}}}
	})
	c := r.AdminHTTP()
	pod := func(name, node string) {
		p := apiservertest.NewPod(name)
		p.Spec.NodeName = node
		r.Must(p)
	}
	pod("a", "")
	pod("b", "n")
	pod("gone", "")

	for _, step := range admissionGetsTheAttemptCases {
		headers := []string{}
		if step.media != "" {
			headers = append(headers, "Content-Type", step.media)
		}
		a := r.Call(c, step.method, step.path, step.body, headers...)
		if a.Code >= 500 || a.Code >= 400 && !strings.Contains(step.path, "ports") &&
			!strings.Contains(a.Body, "Upgrade") && !strings.Contains(a.Body, "host assigned") {
			t.Errorf("%s %s: %d %s", step.method, step.path, a.Code, a.Body)
		}
		got := slices.Compact(j.take()) // an attempt may be repeated
		if !slices.Equal(got, step.want) {
			t.Errorf("%s %s\n got %q\nwant %q", step.method, step.path, got, step.want)
		}
	}
}

// The change that a mutating plugin makes to the body of a subresource takes effect.
func TestAdmissionChangesBodies(t *testing.T) {
	node := &apiservertest.FakeNode{}
	r := apiservertest.StartReplica(t, func(c *apiserver.Config) {
		c.Outbound.Streams = node
		c.Admission.Mutators = admission.Mutators{{Name: "test",
			Plugins: []admission.Plugin{{Name: "change", Admit: func(_ context.Context, a *api.Attempt) error {
				switch o := a.Object.(type) {
				case *autoscalingv1.Scale:
					o.Spec.Replicas = 7
				case *corev1.Binding:
					o.Target.Name = "other"
				}
				return nil
			}}}}}
	})
	ctx := apiservertest.Within(t)
	client := r.Admin()
	d := &appsv1.Deployment{ObjectMeta: metav1.ObjectMeta{Name: "d"}, Spec: appsv1.DeploymentSpec{
		Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"a": "b"}},
		Template: corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{"a": "b"}},
			Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "c", Image: "i"}}}}}}
	if _, err := client.AppsV1().Deployments("default").Create(ctx, d, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	scale, err := client.AppsV1().Deployments("default").UpdateScale(ctx, "d", &autoscalingv1.Scale{
		ObjectMeta: metav1.ObjectMeta{Name: "d"}, Spec: autoscalingv1.ScaleSpec{Replicas: 2}}, metav1.UpdateOptions{})
	if err != nil || scale.Spec.Replicas != 7 {
		t.Errorf("scaled to %v, %v", scale, err)
	}
	r.Must(apiservertest.NewPod("p"))
	if err := client.CoreV1().Pods("default").Bind(ctx, &corev1.Binding{ObjectMeta: metav1.ObjectMeta{Name: "p"},
		Target: corev1.ObjectReference{Kind: "Node", Name: "n"}}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	if p, err := client.CoreV1().Pods("default").Get(ctx, "p", metav1.GetOptions{}); err != nil ||
		p.Spec.NodeName != "other" {
		t.Errorf("bound to %q, %v", p.Spec.NodeName, err)
	}
}

// setAllFields is a mutating plugin that sets all fields that admission must not be able to set.
func setAllFields(_ context.Context, a *api.Attempt) error {
	o, ok := a.Object.(api.Object)
	if !ok || a.User.Name != "admin" {
		return nil
	}
	now := metav1.NewTime(time.Unix(1, 0))
	seconds := int64(5)
	o.SetName("evil")
	o.SetGenerateName("evil-")
	o.SetNamespace("kube-system")
	o.SetUID("evil")
	o.SetResourceVersion("1")
	o.SetGeneration(99)
	o.SetCreationTimestamp(now)
	o.SetDeletionTimestamp(&now)
	o.SetDeletionGracePeriodSeconds(&seconds)
	o.SetSelfLink("/evil")
	o.SetManagedFields([]metav1.ManagedFieldsEntry{{Manager: "evil", Operation: "Steal"}})
	o.GetObjectKind().SetGroupVersionKind(corev1.SchemeGroupVersion.WithKind("Evil"))
	switch d := a.Object.(type) {
	case *appsv1.Deployment:
		if a.Facet == "" {
			d.Status.Replicas = 66
		} else {
			evil := int32(66)
			d.Spec.Replicas = &evil
		}
	case *autoscalingv1.Scale:
		d.Status.Replicas = 66
	}
	return nil
}

// A mutating plugin cannot set the status in a write of the object, the spec in a write of the
// status, or metadata that the server maintains. This holds for every verb. Managed fields that
// cannot be decoded are restored with a warning, as in Kubernetes.
func TestAdmissionCannotSetReadOnlyFields(t *testing.T) {
	r := apiservertest.StartReplica(t, func(c *apiserver.Config) {
		c.Admission.Mutators = admission.Mutators{{Name: "test",
			Plugins: []admission.Plugin{{Name: "hostile", Admit: setAllFields}}}}
	})
	c := r.AdminHTTP()
	const path = "/apis/apps/v1/namespaces/default/deployments"
	const jsonType, merge, strategic, apply = "application/json", "application/merge-patch+json",
		"application/strategic-merge-patch+json", "application/apply-patch+yaml"
	body := func(image string) string {
		return `{"apiVersion":"apps/v1","kind":"Deployment","metadata":{"name":"d"},"spec":{"replicas":2,"selector":{"matchLabels":{"a":"b"}},
		"template":{"metadata":{"labels":{"a":"b"}},"spec":{"containers":[{"name":"c","image":"` + image +
			`"}]}}},"status":{"replicas":5}}`
	}
	applied := strings.Replace(body("five"), `,"status":{"replicas":5}`, "", 1)
	scale := func(n int) string {
		return fmt.Sprintf(`{"apiVersion":"autoscaling/v1","kind":"Scale","metadata":{"name":"d"},`+
			`"spec":{"replicas":%d}}`, n)
	}
	var uid string
	deployments := r.Admin().AppsV1().Deployments("default")
	for _, step := range []struct {
		method, path, media, body string
		generation                int64
		replicas, status          int32
	}{
		{"POST", path, jsonType, body("one"), 1, 2, 0},
		{"PUT", path + "/d", jsonType, body("two"), 2, 2, 0},
		{"PATCH", path + "/d", merge, `{"spec":{"replicas":3},"status":{"replicas":5}}`, 3, 3, 0},
		{"PATCH", path + "/d", strategic, `{"metadata":{"labels":{"a":"b"}}}`, 3, 3, 0},
		{"PATCH", path + "/d?fieldManager=m&force=true", apply, applied, 4, 2, 0},
		{"PUT", path + "/d/status", jsonType, body("six"), 4, 2, 5},
		{"PATCH", path + "/d/status", merge, `{"status":{"replicas":6},"spec":{"replicas":9}}`, 4, 2, 6},
		{"PUT", path + "/d/scale", jsonType, scale(7), 5, 7, 6},
		{"PATCH", path + "/d/scale", merge, `{"spec":{"replicas":8}}`, 6, 8, 6},
		{"PATCH", path + "/d/scale?fieldManager=s&force=true", apply, scale(9), 7, 9, 6},
	} {
		what := step.method + " " + step.path + " " + step.media
		a := r.Call(c, step.method, step.path, step.body, "Content-Type", step.media)
		if a.Code/100 != 2 {
			t.Fatalf("%s: %d %s", what, a.Code, a.Body)
		}
		if w := strings.Join(a.Header.Values("Warning"), ""); !strings.Contains(w,
			"managedFields was in an invalid state after admission") {
			t.Errorf("%s: warnings %q", what, w)
		}
		if strings.Contains(strings.ToLower(a.Body), "evil") {
			t.Errorf("%s answers %s", what, a.Body)
		}
		d, err := deployments.Get(apiservertest.Within(t), "d", metav1.GetOptions{})
		if err != nil {
			t.Fatalf("%s: %v", what, err)
		}
		if uid == "" {
			uid = string(d.UID)
		}
		if string(d.UID) != uid || d.GenerateName != "" || d.DeletionTimestamp != nil ||
			d.DeletionGracePeriodSeconds != nil || d.SelfLink != "" ||
			time.Since(d.CreationTimestamp.Time) > time.Hour || d.Kind == "Evil" {
			t.Errorf("%s: %+v", what, d.ObjectMeta)
		}
		if d.Generation != step.generation || *d.Spec.Replicas != step.replicas || d.Status.Replicas != step.status {
			t.Errorf("%s: generation %d, replicas %d, status %d, want %+v", what, d.Generation, *d.Spec.Replicas,
				d.Status.Replicas, step)
		}
		if len(d.ManagedFields) == 0 || slices.ContainsFunc(d.ManagedFields, func(e metav1.ManagedFieldsEntry) bool {
			return e.Manager == "evil"
		}) {
			t.Errorf("%s: managers %+v", what, d.ManagedFields)
		}
	}
	for _, place := range []string{path + "/evil", "/apis/apps/v1/namespaces/kube-system/deployments/evil",
		"/apis/apps/v1/namespaces/kube-system/deployments/d"} {
		if a := r.Call(c, "GET", place, ""); a.Code != http.StatusNotFound {
			t.Errorf("%s: %d", place, a.Code)
		}
	}
}

// Fields that admission set have no field manager, as in Kubernetes.
func TestFieldsSetByAdmissionHaveNoOwner(t *testing.T) {
	r := apiservertest.StartReplica(t, func(c *apiserver.Config) {
		c.Admission.Mutators = admission.Mutators{{Name: "test",
			Plugins: []admission.Plugin{{Name: "label", Admit: func(_ context.Context, a *api.Attempt) error {
				if o, ok := a.Object.(*corev1.ConfigMap); ok {
					o.Labels = map[string]string{"injected": "yes"}
				}
				return nil
			}}}}}
	})
	maps, ctx := r.Admin().CoreV1().ConfigMaps("default"), apiservertest.Within(t)
	made, err := maps.Create(ctx, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "a"},
		Data: map[string]string{"k": "v"}}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	made.Data["k"] = "w"
	now, err := maps.Update(ctx, made, metav1.UpdateOptions{})
	if err != nil || now.Labels["injected"] != "yes" {
		t.Fatal(now, err)
	}
	for _, e := range now.ManagedFields {
		if !strings.Contains(string(e.FieldsV1.Raw), "f:k") || strings.Contains(string(e.FieldsV1.Raw), "injected") {
			t.Errorf("%s owns %s", e.Manager, e.FieldsV1.Raw)
		}
	}
}

// If a later plugin changes the object, all mutating plugins are called a second time, and not a
// third time.
func TestReinvocation(t *testing.T) {
	for _, asks := range []bool{false, true} {
		var order []string
		note := func(name string, again bool) admission.Plugin {
			return admission.Plugin{Name: name, Admit: func(_ context.Context, a *api.Attempt) error {
				order = append(order, fmt.Sprint(name, a.IsSecondRound()))
				if again {
					a.RequestSecondRound()
				}
				return nil
			}}
		}
		m := admission.Mutators{{Plugins: []admission.Plugin{note("built-in ", false)}},
			{Plugins: []admission.Plugin{note("webhook ", asks)}}}
		if err := m.Admit(t.Context(), &api.Attempt{}); err != nil {
			t.Fatal(err)
		}
		want := "[built-in false webhook false]"
		if asks {
			want = "[built-in false webhook false built-in true webhook true]"
		}
		if got := fmt.Sprint(order); got != want {
			t.Errorf("called %s, want %s", got, want)
		}
	}
}

// Concurrent validating plugins wait only for the slowest plugin. The error of the first rejecting
// plugin in the list is returned, the preconditions of all plugins are kept, and a panic of a
// plugin rejects the attempt.
func TestConcurrentValidators(t *testing.T) {
	const n = 8
	var all sync.WaitGroup
	all.Add(n)
	meet := admission.Phase{SideBySide: true}
	for i := range n {
		meet.Plugins = append(meet.Plugins, admission.Plugin{Name: fmt.Sprint(i),
			Admit: func(_ context.Context, a *api.Attempt) error {
				all.Done()
				all.Wait() // returns only when all run at once
				a.Require(api.Check{})
				if i > 1 {
					return apierrors.NewBadRequest(fmt.Sprint("by ", i))
				}
				return nil
			}})
	}
	a := &api.Attempt{}
	if err := (admission.Validators{meet}).Admit(t.Context(), a); err == nil ||
		!strings.Contains(err.Error(), "by 2") || len(a.Checks()) != n {
		t.Errorf("%v, %d checks", err, len(a.Checks()))
	}
	bad := admission.Phase{SideBySide: true, Plugins: []admission.Plugin{
		{Name: "calm", Admit: func(context.Context, *api.Attempt) error { return nil }},
		{Name: "wild", Admit: func(context.Context, *api.Attempt) error { panic("x") }},
	}}
	if err := (admission.Validators{bad}).Admit(t.Context(), a); !apierrors.IsInternalError(err) {
		t.Errorf("after a panic: %v", err)
	}
}
