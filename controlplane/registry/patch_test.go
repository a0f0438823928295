package registry

import (
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/controlplane/api"
)

func (e *env) patch(obj api.Object, t types.PatchType, patch string, set ...func(*api.Request)) (
	api.Object, bool, error,
) {
	req := e.request(api.VerbPatch, obj)
	req.Patch.Type, req.Patch.Body = t, []byte(patch)
	if t == types.ApplyPatchType {
		req.Patch.Options.FieldManager = "applier"
	}
	for _, f := range set {
		f(req)
	}
	out, created, err := e.Registry.Patch(e.ctx, req, e.admit)
	if err != nil {
		return nil, false, err
	}
	return out.(api.Object), created, nil
}

func deployment(name string, replicas int32) *appsv1.Deployment {
	labels := map[string]string{"app": name}
	return &appsv1.Deployment{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name, Labels: labels},
		Spec: appsv1.DeploymentSpec{
			Replicas: &replicas, Selector: &metav1.LabelSelector{MatchLabels: labels},
			Template: corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: labels}, Spec: pod("", "").Spec},
		},
	}
}

// F45: a patch starts from the stored object.
func TestPatchKinds(t *testing.T) {
	for name, c := range map[string]struct {
		kind  types.PatchType
		patch string
	}{
		"json": {types.JSONPatchType,
			`[{"op":"test","path":"/data/a","value":"1"},{"op":"add","path":"/data/b","value":"2"}]`},
		"merge":     {types.MergePatchType, `{"data":{"b":"2"}}`},
		"strategic": {types.StrategicMergePatchType, `{"data":{"b":"2"}}`},
	} {
		t.Run(name, func(t *testing.T) {
			e := newEnv(t)
			_, _, err := e.patch(configMap("default", "a"), c.kind, c.patch)
			refused(t, err, 404, metav1.StatusReasonNotFound)
			e.create(configMap("default", "a", "a", "1"))
			got, _, err := e.patch(configMap("default", "a"), c.kind, c.patch)
			if err != nil {
				t.Fatal(err)
			}
			if d := got.(*corev1.ConfigMap).Data; d["a"] != "1" || d["b"] != "2" {
				t.Fatalf("patched to %v", d)
			}
			before := e.store.Applied()
			if _, _, err := e.patch(configMap("default", "a"), c.kind, c.patch); err != nil {
				t.Fatal(err)
			}
			if e.store.Applied() != before {
				t.Fatal("the same patch again was written")
			}
		})
	}
}

func TestStrategicMergeKnowsListKeys(t *testing.T) {
	e := newEnv(t)
	e.create(pod("default", "p"))
	got, _, err := e.patch(pod("default", "p"), types.StrategicMergePatchType,
		`{"spec":{"containers":[{"name":"main","image":"registry.lab/hello:2"}]}}`)
	if err != nil {
		t.Fatal(err)
	}
	c := got.(*corev1.Pod).Spec.Containers
	if len(c) != 1 || c[0].Image != "registry.lab/hello:2" || len(c[0].Env) != 2 {
		t.Fatalf("containers are now %+v", c)
	}
}

func TestPatchRefusals(t *testing.T) {
	e := newEnv(t)
	made := e.create(configMap("default", "a", "k", "v"))
	for name, c := range map[string]struct {
		kind   types.PatchType
		patch  string
		strict bool
		code   int32
		reason metav1.StatusReason
	}{
		"malformed JSON patch": {kind: types.JSONPatchType, patch: `{"op":"add"}`, code: 400,
			reason: metav1.StatusReasonBadRequest},
		"failed test op": {kind: types.JSONPatchType, patch: `[{"op":"test","path":"/data/k","value":"no"}]`,
			code: 422, reason: metav1.StatusReasonInvalid},
		"merge of a list": {kind: types.MergePatchType, patch: `[]`, code: 400,
			reason: metav1.StatusReasonBadRequest},
		"wrong type": {kind: types.MergePatchType, patch: `{"data":{"k":5}}`, code: 400,
			reason: metav1.StatusReasonBadRequest},
		"unknown field, strict": {kind: types.MergePatchType, patch: `{"daata":{"k":"w"}}`, strict: true, code: 400,
			reason: metav1.StatusReasonBadRequest},
		"stale resourceVersion": {kind: types.MergePatchType,
			patch: `{"metadata":{"resourceVersion":"1"},"data":{"k":"w"}}`, code: 409,
			reason: metav1.StatusReasonConflict},
		"another name": {kind: types.MergePatchType, patch: `{"metadata":{"name":"b"}}`, code: 400,
			reason: metav1.StatusReasonBadRequest},
		"unsupported patch type": {kind: "application/none", patch: `{}`, code: 415,
			reason: metav1.StatusReasonUnsupportedMediaType},
	} {
		if name == "stale resourceVersion" && made.GetResourceVersion() == "1" {
			made = e.update(configMap("default", "a", "k", "v2"), "")
		}
		before := e.store.Applied()
		_, _, err := e.patch(configMap("default", "a"), c.kind, c.patch, func(r *api.Request) {
			if c.strict {
				r.Patch.Options.FieldValidation = metav1.FieldValidationStrict
			}
		})
		t.Run(name, func(t *testing.T) {
			s := refused(t, err, c.code, c.reason)
			if c.strict && !strings.Contains(s.Message, `unknown field "daata"`) {
				t.Fatalf("message %q", s.Message)
			}
			if e.store.Applied() != before {
				t.Fatal("the store changed") // F44
			}
		})
	}
}

func TestApplyCreatesOwnsAndConflicts(t *testing.T) {
	e := newEnv(t)
	const intent = "apiVersion: v1\nkind: ConfigMap\nmetadata:\n  name: a\n  namespace: default\ndata:\n  k: v\n"
	got, created, err := e.patch(configMap("default", "a"), types.ApplyPatchType, intent)
	if err != nil || !created {
		t.Fatalf("created %v, %v", created, err)
	}
	mf := got.GetManagedFields()
	if len(mf) != 1 || mf[0].Manager != "applier" || mf[0].Operation != metav1.ManagedFieldsOperationApply {
		t.Fatalf("managedFields %+v", mf)
	}
	before := e.store.Applied()
	if _, created, err = e.patch(configMap("default", "a"), types.ApplyPatchType, intent); err != nil || created {
		t.Fatalf("again: created %v, %v", created, err)
	}
	if e.store.Applied() != before {
		t.Fatal("applying the same again was written")
	}

	other := strings.Replace(intent, "k: v", "k: w", 1)
	as := func(manager string, force bool) func(*api.Request) {
		return func(r *api.Request) { r.Patch.Options.FieldManager, r.Patch.Options.Force = manager, &force }
	}
	_, _, err = e.patch(configMap("default", "a"), types.ApplyPatchType, other, as("other", false))
	s := refused(t, err, 409, metav1.StatusReasonConflict)
	if len(s.Details.Causes) != 1 || s.Details.Causes[0].Type != metav1.CauseTypeFieldManagerConflict ||
		s.Details.Causes[0].Field != ".data.k" {
		t.Fatalf("causes %+v", s.Details)
	}
	got, _, err = e.patch(configMap("default", "a"), types.ApplyPatchType, other, as("other", true))
	if err != nil || got.(*corev1.ConfigMap).Data["k"] != "w" {
		t.Fatalf("forced: %v, %v", got, err)
	}
	// A field that its manager no longer applies is removed.
	got, _, err = e.patch(configMap("default", "a"), types.ApplyPatchType,
		strings.Replace(intent, "  k: v\n", "  x: z\n", 1), as("other", true))
	if err != nil {
		t.Fatal(err)
	}
	if d := got.(*corev1.ConfigMap).Data; d["x"] != "z" || d["k"] != "" {
		t.Fatalf("left %v", d)
	}
}

func TestApplyMeetsFieldsOfAnUpdate(t *testing.T) {
	e := newEnv(t)
	made := e.create(configMap("default", "a", "k", "v"))
	if mf := made.GetManagedFields(); len(mf) != 1 || mf[0].Manager != "kubectl" ||
		mf[0].Operation != metav1.ManagedFieldsOperationUpdate {
		t.Fatalf("managedFields after create: %+v", mf)
	}
	const intent = `{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"a"},"data":{"k":"w"}}`
	_, _, err := e.patch(configMap("default", "a"), types.ApplyPatchType, intent)
	refused(t, err, 409, metav1.StatusReasonConflict)
}

// Objects of built-in components have no field tracking; the first apply still respects their
// fields.
func TestApplyToUntrackedObject(t *testing.T) {
	e := newEnv(t)
	e.user = api.User{Name: api.UserController}
	made := e.create(configMap("default", "a", "k", "v", "l", "v"))
	if len(made.GetManagedFields()) != 0 {
		t.Fatalf("managedFields %+v", made.GetManagedFields())
	}
	e.user = api.User{Name: "alice"}
	const intent = `{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"a"},"data":{"k":"w"}}`
	_, _, err := e.patch(configMap("default", "a"), types.ApplyPatchType, intent)
	s := refused(t, err, 409, metav1.StatusReasonConflict)
	if !strings.Contains(s.Message, "before-first-apply") {
		t.Fatalf("message %q", s.Message)
	}
}

func TestApplyRefusals(t *testing.T) {
	e := newEnv(t)
	_, _, err := e.patch(configMap("default", "a"), types.ApplyPatchType,
		`{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"a"},"daata":{}}`)
	refused(t, err, 400, metav1.StatusReasonBadRequest)
	_, _, err = e.patch(configMap("default", "a"), types.ApplyPatchType,
		`{"apiVersion":"v1","kind":"Secret","metadata":{"name":"a"}}`)
	refused(t, err, 400, metav1.StatusReasonBadRequest)
	_, _, err = e.patch(configMap("default", "a"), types.ApplyPatchType,
		`{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"a"}}`,
		func(r *api.Request) { r.Patch.Options.FieldManager = "" })
	refused(t, err, 422, metav1.StatusReasonInvalid)
	_, _, err = e.patch(configMap("default", "a"), types.ApplyPatchType, "{")
	refused(t, err, 400, metav1.StatusReasonBadRequest)
}

func TestApplyDeploymentAndGeneration(t *testing.T) {
	e := newEnv(t)
	made := e.create(deployment("web", 3)).(*appsv1.Deployment)
	gen := made.Generation
	report := made.DeepCopy()
	report.Status.Replicas = 3
	if got := e.update(report, "status"); got.GetGeneration() != gen {
		t.Fatalf("a status report moved the generation from %d to %d", gen, got.GetGeneration())
	}
	got, _, err := e.patch(deployment("web", 3), types.StrategicMergePatchType, `{"spec":{"replicas":5}}`)
	if err != nil {
		t.Fatal(err)
	}
	if d := got.(*appsv1.Deployment); *d.Spec.Replicas != 5 || d.Status.Replicas != 3 ||
		(gen > 0 && d.Generation != gen+1) {
		t.Fatalf("replicas %d, status %d, generation %d after %d", *d.Spec.Replicas, d.Status.Replicas,
			d.Generation, gen)
	}
}
