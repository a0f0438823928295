package registry

import (
	"context"
	"encoding/json"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/yaml"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/kinds/kindstest"
	"keelson.dev/keelson/controlplane/registry/storedform"
	"keelson.dev/keelson/raftstore"
)

// gated is a pod specification with fields of disabled feature gates.
const gated = `{evictionResponders: [{name: example.com/a}], volumes: [{name: v, emptyDir: {mode: 511}}],
  containers: [{name: main, image: a, volumeMounts: [{name: v, mountPath: /v, bindMountOptions: [noexec]}]}]}`

// gatedNames are the names of the dropped fields in gated.
var gatedNames = []string{"evictionResponders", `"mode"`, "f:mode", "bindMountOptions"}

func gatedSpec(t *testing.T) (spec corev1.PodSpec) {
	t.Helper()
	if err := yaml.UnmarshalStrict([]byte(gated), &spec); err != nil {
		t.Fatal(err)
	}
	return spec
}

func gatedDeployment(t *testing.T, name string) *appsv1.Deployment {
	d := deployment(name, 1)
	d.Spec.Template.Spec = gatedSpec(t)
	return d
}

// checkDropped reports the dropped fields that an object has or that its managedFields name.
func checkDropped(t *testing.T, what string, obj api.Object) {
	t.Helper()
	text, err := json.Marshal(obj)
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range gatedNames {
		if strings.Contains(string(text), name) {
			t.Errorf("%s: the object has %s: %s", what, name, text)
		}
	}
}

// Fields of disabled feature gates are removed from pods and the pod templates of all kinds, before
// they are stored and before a manager owns them.
func TestFieldsOfDisabledGatesAreDropped(t *testing.T) { // F45
	e := newEnv(t)
	plain := func(name string) metav1.ObjectMeta { return metav1.ObjectMeta{Namespace: "default", Name: name} }
	p := &corev1.Pod{ObjectMeta: plain("p"), Spec: gatedSpec(t)}
	checkDropped(t, "create a pod", e.create(p))
	checkDropped(t, "create a Deployment", e.create(gatedDeployment(t, "d")))
	job := gatedSpec(t)
	job.RestartPolicy = corev1.RestartPolicyNever
	jobs := batchv1.JobSpec{Template: corev1.PodTemplateSpec{Spec: job},
		Scheduling: &batchv1.JobSchedulingConfiguration{}}
	cron := e.create(&batchv1.CronJob{ObjectMeta: plain("c"),
		Spec: batchv1.CronJobSpec{Schedule: "0 0 * * *", JobTemplate: batchv1.JobTemplateSpec{Spec: jobs}}})
	checkDropped(t, "create a CronJob", cron)
	if cron.(*batchv1.CronJob).Spec.JobTemplate.Spec.Scheduling != nil {
		t.Error("the CronJob has spec.jobTemplate.spec.scheduling")
	}
	checkDropped(t, "create a PodTemplate",
		e.create(&corev1.PodTemplate{ObjectMeta: plain("t"), Template: corev1.PodTemplateSpec{Spec: gatedSpec(t)}}))

	was, err := e.get(p)
	if err != nil {
		t.Fatal(err)
	}
	again := was.DeepCopyObject().(*corev1.Pod)
	again.Spec.EvictionResponders = gatedSpec(t).EvictionResponders
	if updated := e.update(again, ""); updated.GetResourceVersion() != was.GetResourceVersion() {
		t.Error("an update of nothing but a dropped field was stored")
	}
	e.create(deployment("update", 1))
	checkDropped(t, "update", e.update(gatedDeployment(t, "update"), ""))
	for name, kind := range map[string]types.PatchType{"merge": types.MergePatchType,
		"strategic": types.StrategicMergePatchType, "apply": types.ApplyPatchType, "new": types.ApplyPatchType} {
		d := deployment(name, 1)
		if name != "new" {
			e.create(d)
		}
		patch := patchOf(t, gatedDeployment(t, name))
		patched, _, err := e.patch(d, kind, patch, forced(kind))
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		checkDropped(t, name, patched)
		repeated, _, err := e.patch(d, kind, patch, forced(kind))
		if err != nil || repeated.GetResourceVersion() != patched.GetResourceVersion() {
			t.Errorf("%s: the same patch again changes the object (%v)", name, err)
		}
	}
}

// forced makes an apply take the fields of other managers.
func forced(kind types.PatchType) func(*api.Request) {
	return func(r *api.Request) {
		if kind == types.ApplyPatchType {
			r.Patch.Options.Force = new(bool)
			*r.Patch.Options.Force = true
		}
	}
}

// patchOf returns the labels and the specification of a Deployment as a patch.
func patchOf(t *testing.T, d *appsv1.Deployment) string {
	t.Helper()
	labels := map[string]any{"app": d.Name}
	template := map[string]any{}
	if err := yaml.Unmarshal([]byte(gated), &template); err != nil {
		t.Fatal(err)
	}
	data, err := json.Marshal(map[string]any{
		"apiVersion": "apps/v1", "kind": "Deployment", "metadata": map[string]any{"name": d.Name, "labels": labels},
		"spec": map[string]any{"selector": map[string]any{"matchLabels": labels},
			"template": map[string]any{"metadata": map[string]any{"labels": labels}, "spec": template}}})
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

// Fields of disabled gates that mutating admission adds are dropped as well.
func TestFieldsOfDisabledGatesAreDroppedAfterAdmission(t *testing.T) { // F45
	e := newEnv(t)
	e.admit = Stages{Validating: kindstest.ValidateAttempt, Mutating: func(_ context.Context, a *api.Attempt) error {
		a.Object.(*appsv1.Deployment).Spec.Template.Spec.EvictionResponders = gatedSpec(t).EvictionResponders
		return nil
	}}
	checkDropped(t, "create", e.create(deployment("d", 1)))
	checkDropped(t, "update", e.update(deployment("d", 2), ""))
}

// An object stored with a field of a disabled gate keeps the field and may get more fields of that
// gate. Fields of other gates are dropped.
func TestStoredFieldsOfDisabledGatesStay(t *testing.T) { // F45
	e := newEnv(t)
	stored := deployment("d", 1)
	stored.Spec.Template.Spec.Volumes = gatedSpec(t).Volumes
	kind := e.kinds.ByType(stored)
	kind.SetTypeMeta(stored)
	kind.Writes.Default(stored)
	value, err := storedform.NewCodec(kind.Storage).Encode(stored)
	if err != nil {
		t.Fatal(err)
	}
	e.put(raftstore.Put(kind.Storage.Prefix+storedform.ObjectKey(kind, "default", "d"), value))
	more := gatedDeployment(t, "d")
	more.Spec.Template.Spec.Volumes = append(more.Spec.Template.Spec.Volumes,
		*more.Spec.Template.Spec.Volumes[0].DeepCopy())
	more.Spec.Template.Spec.Volumes[1].Name = "w"
	check := func(what string, obj api.Object, volumes int) {
		t.Helper()
		spec := obj.(*appsv1.Deployment).Spec.Template.Spec
		if len(spec.Volumes) != volumes || len(spec.EvictionResponders) > 0 ||
			len(spec.Containers[0].VolumeMounts) > 0 && len(spec.Containers[0].VolumeMounts[0].BindMountOptions) > 0 {
			t.Errorf("%s: %+v", what, spec)
		}
		for _, v := range spec.Volumes {
			if v.EmptyDir.Mode == nil {
				t.Errorf("%s: volume %s lost its mode", what, v.Name)
			}
		}
	}
	applied, _, err := e.patch(stored, types.ApplyPatchType, patchOf(t, more), forced(types.ApplyPatchType))
	if err != nil {
		t.Fatal(err)
	}
	check("apply", applied, 1)
	check("update", e.update(more, ""), 2)
	less := deployment("d", 1)
	e.update(less, "")
	checkDropped(t, "an update after the field was removed", e.update(gatedDeployment(t, "d"), ""))
}
