package registry

import (
	"slices"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	autoscalingv1 "k8s.io/api/autoscaling/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/kinds"
)

const webIntent = `{"apiVersion":"apps/v1","kind":"Deployment","metadata":{"name":"web"},"spec":{"replicas":3,
"selector":{"matchLabels":{"app":"web"}},"template":{"metadata":{"labels":{"app":"web"}},"spec":{"containers":[{"name":"c","image":"i"}]}}}}`

// owners returns the managers that own a field, with the subresource that they wrote.
func owners(obj api.Object, field string) []string {
	var out []string
	for _, m := range obj.GetManagedFields() {
		if strings.Contains(string(m.FieldsV1.Raw), `"f:`+field+`"`) {
			out = append(out, strings.TrimSuffix(m.Manager+"/"+m.Subresource, "/"))
		}
	}
	slices.Sort(out)
	return out
}

func (e *env) scaleTo(n int32, change ...func(*api.Request)) {
	e.t.Helper()
	req := e.request(api.VerbUpdate, deployment("web", 0))
	req.Subresource, req.Object = "scale",
		&autoscalingv1.Scale{ObjectMeta: metav1.ObjectMeta{Name: "web", Namespace: "default"},
			Spec: autoscalingv1.ScaleSpec{Replicas: n}}
	for _, f := range change {
		f(req)
	}
	if _, _, err := e.Registry.Update(e.ctx, req, e.admit); err != nil {
		e.t.Fatal(err)
	}
}

func as(manager string) func(*api.Request) {
	return func(r *api.Request) { r.Patch.Options.FieldManager = manager }
}

func replicas(obj any) int32 { return *obj.(*appsv1.Deployment).Spec.Replicas }

// A replica count set by a controller stays when a later apply no longer contains it.
func TestScaledByControllerOutlivesApply(t *testing.T) {
	e := newEnv(t)
	d := deployment("web", 0)
	if _, _, err := e.patch(d, types.ApplyPatchType, webIntent); err != nil {
		t.Fatal(err)
	}
	e.user = api.User{Name: api.UserController}
	e.scaleTo(10, func(r *api.Request) { r.Client.UserAgent = "autoscaler" })
	e.user = api.User{Name: "alice"}
	got, _, err := e.patch(d, types.ApplyPatchType, strings.Replace(webIntent, `"replicas":3,`, "", 1))
	if err != nil {
		t.Fatal(err)
	}
	if n := replicas(got); n != 10 {
		t.Errorf("scaled to 10, then applied without replicas: %d", n)
	}
	if who := owners(got.(api.Object), "replicas"); !slices.Equal(who, []string{"autoscaler/scale"}) {
		t.Errorf("replicas belong to %q", who)
	}
	// An apply with the field again reports the conflict.
	_, _, err = e.patch(d, types.ApplyPatchType, webIntent)
	if s := refused(t, err, 409, metav1.StatusReasonConflict); !strings.Contains(s.Message, "autoscaler") {
		t.Errorf("message %q", s.Message)
	}
}

// Subresource scale supports server-side apply; the ownership is recorded for the main object's
// field.
func TestApplyToScale(t *testing.T) {
	e := newEnv(t)
	d := deployment("web", 0)
	if _, _, err := e.patch(d, types.ApplyPatchType, webIntent); err != nil {
		t.Fatal(err)
	}
	scale := func(r *api.Request) { r.Subresource = "scale" }
	const five = `{"apiVersion":"autoscaling/v1","kind":"Scale","metadata":{"name":"web"},"spec":{"replicas":5}}`
	_, _, err := e.patch(d, types.ApplyPatchType, five, scale, as("scaler"))
	if s := refused(t, err, 409, metav1.StatusReasonConflict); len(s.Details.Causes) != 1 ||
		s.Details.Causes[0].Field != ".spec.replicas" {
		t.Errorf("causes %+v", s.Details)
	}
	force := true
	got, created, err := e.patch(d, types.ApplyPatchType, five, scale, as("scaler"), func(r *api.Request) {
		r.Patch.Options.Force = &force
	})
	if err != nil || created || got.(*autoscalingv1.Scale).Spec.Replicas != 5 {
		t.Fatalf("%+v, created %v, %v", got, created, err)
	}
	got, _, err = e.patch(d, types.ApplyPatchType, strings.Replace(webIntent, `"replicas":3,`, "", 1))
	if err != nil || replicas(got) != 5 {
		t.Fatalf("applied without replicas: %v, %v", got, err)
	}
	if who := owners(got.(api.Object), "replicas"); !slices.Equal(who, []string{"scaler/scale"}) {
		t.Errorf("replicas belong to %q", who)
	}
	_, _, err = e.patch(d, types.ApplyPatchType, webIntent, scale)
	refused(t, err, 400, metav1.StatusReasonBadRequest) // a Deployment is not a Scale
	_, _, err = e.patch(d, types.ApplyPatchType, strings.Replace(five, `"replicas"`, `"replica"`, 1), scale)
	refused(t, err, 400, metav1.StatusReasonBadRequest)
	_, _, err = e.patch(deployment("none", 0), types.ApplyPatchType, strings.Replace(five, "web", "none", 1), scale)
	refused(t, err, 404, metav1.StatusReasonNotFound)
}

// A write does not own fields that it cannot set: the status in a main write, the spec in a status
// write.
func TestNobodyOwnsWhatTheyCannotSet(t *testing.T) {
	e := newEnv(t)
	e.user = api.User{Name: "alice"}
	with := func(status string) string { return strings.TrimSuffix(webIntent, "}") + `,"status":` + status + "}" }
	got, _, err := e.patch(deployment("web", 0), types.ApplyPatchType, with(`{"replicas":7}`))
	if err != nil {
		t.Fatal(err)
	}
	applied := got.(*appsv1.Deployment)
	if who := owners(applied, "status"); len(who) != 0 || applied.Status.Replicas != 0 {
		t.Errorf("a status applied to the object: %d, owned by %q", applied.Status.Replicas, who)
	}
	made := deployment("other", 2)
	made.Status.Replicas = 7
	if who := owners(e.create(made), "status"); len(who) != 0 {
		t.Errorf("a status at creation belongs to %q", who)
	}
	report := applied.DeepCopy()
	report.Status.Replicas, report.Spec.Paused = 3, true
	stored := e.update(report, "status").(*appsv1.Deployment)
	if who := owners(stored, "status"); !slices.Equal(who, []string{"kubectl/status"}) {
		t.Errorf("the status belongs to %q", who)
	}
	if who := owners(stored, "paused"); len(who) != 0 || stored.Spec.Paused {
		t.Errorf("a spec written with the status: %v, owned by %q", stored.Spec.Paused, who)
	}
	// An update of the whole object, including the status, does not change the status's owner.
	whole := stored.DeepCopy()
	whole.Status.Replicas, whole.Spec.MinReadySeconds = 9, 4
	stored = e.update(whole, "").(*appsv1.Deployment)
	if who := owners(stored, "status"); !slices.Equal(who, []string{"kubectl/status"}) || stored.Status.Replicas != 3 {
		t.Errorf("after a put the status is %d and belongs to %q", stored.Status.Replicas, who)
	}
}

// For every kind, an apply of the status owns only fields that it can set, and these exist.
func TestStatusOwnsWhatItSets(t *testing.T) {
	r := New(nil, kinds.All())
	for _, k := range r.kinds.All() {
		status := k.Subresources["status"]
		if status == nil || k.Serving.Virtual {
			continue
		}
		fm, err := fieldManager(r, k, "status")
		if err != nil {
			t.Fatal(err)
		}
		live := k.Type.New()
		k.SetTypeMeta(live)
		live.SetName("a")
		intent := &unstructured.Unstructured{Object: map[string]any{}}
		intent.SetGroupVersionKind(k.GVK)
		intent.SetName("a")
		intent.SetLabels(map[string]string{"stated": "label"})
		intent.SetAnnotations(map[string]string{"stated": "annotation"})
		intent.SetFinalizers([]string{"example.com/stated"})
		out, err := fm.Apply(live.DeepCopyObject(), intent, "m", false)
		if err != nil {
			t.Fatalf("%s: %v", k.Resource, err)
		}
		obj := out.(api.Object)
		status.PrepareUpdate(obj, live)
		for field, is := range map[string]bool{"labels": len(obj.GetLabels()) > 0,
			"annotations": len(obj.GetAnnotations()) > 0, "finalizers": len(obj.GetFinalizers()) > 0} {
			if owned := len(owners(obj, field)) > 0; owned != is {
				t.Errorf("%s: the status sets %s: %v; owns them: %v", k.Resource, field, is, owned)
			}
		}
	}
}
