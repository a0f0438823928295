package controllers_test

import (
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/controllers/daemonset"
	"keelson.dev/keelson/controlplane/controllers/engine"
	"keelson.dev/keelson/controlplane/controllers/job"
	"keelson.dev/keelson/controlplane/controllers/replicaset"
	"keelson.dev/keelson/controlplane/controllers/statefulset"
	"keelson.dev/keelson/controlplane/controllers/testcluster"
	"keelson.dev/keelson/internal/virtual"
)

// orphanPod creates a pod with a finalizer, so that the pod stays even if a controller deletes it.
func orphanPod(
	w *testcluster.Cluster, name, namespace, label string, phase corev1.PodPhase, owners ...metav1.OwnerReference,
) {
	w.T.Helper()
	p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name,
		Labels:     map[string]string{"app": label},
		Finalizers: []string{"example.com/hold"}, OwnerReferences: owners}}
	p.Spec = testcluster.NewDeployment("web", 1, "web:1").Spec.Template.Spec
	made, err := client.Create(w.Ctx, w.Admin, p)
	if err != nil {
		w.T.Fatal(err)
	}
	setPhase(w, made.Namespace, name, phase)
}

func setPhase(w *testcluster.Cluster, namespace, name string, phase corev1.PodPhase) {
	w.T.Helper()
	w.Eventually("the phase of "+name, func() error {
		p, err := client.Get[*corev1.Pod](w.Ctx, w.Admin, namespace, name)
		if err != nil {
			return err
		}
		p = p.DeepCopy()
		p.Status.Phase = phase
		_, err = client.UpdateStatus(w.Ctx, w.Admin, p)
		return err
	})
}

// controllerOf returns the kind and UID of a pod's controller; "" if it has none.
func controllerOf(w *testcluster.Cluster, namespace, name string) string {
	w.T.Helper()
	p, err := client.Get[*corev1.Pod](w.Ctx, w.Admin, namespace, name)
	if err != nil {
		w.T.Fatal(err)
	}
	if ref := metav1.GetControllerOf(p); ref != nil {
		return ref.Kind + " " + string(ref.UID)
	}
	return ""
}

var adoptedN = int32(10)

var adoptedYes = true

var adoptedMeta = metav1.ObjectMeta{Namespace: "default", Name: "web"}

var adoptedSelector = &metav1.LabelSelector{MatchLabels: map[string]string{"app": "web"}}

var adoptedTemplate = testcluster.NewDeployment("web", 1, "web:1").Spec.Template

var adoptedForJob = func() corev1.PodTemplateSpec {
	template := *adoptedTemplate.DeepCopy()
	template.Spec.RestartPolicy = corev1.RestartPolicyNever
	return template
}()

// adoptedCases are the cases of TestPodsAreAdoptedAsInKubernetes.
var adoptedCases = map[string]struct {
	controller func(engine.Deps) *engine.Descriptor
	owner      api.Object
	ended      bool // ended pods are adopted and released
	named      bool // only pods with the owner's ordinals are adopted
}{
	"ReplicaSet": {replicaset.New, &appsv1.ReplicaSet{ObjectMeta: adoptedMeta, Spec: appsv1.ReplicaSetSpec{
		Replicas: &adoptedN, Selector: adoptedSelector, Template: adoptedTemplate}}, false, false},
	"ReplicationController": {replicaset.NewForReplicationControllers,
		&corev1.ReplicationController{ObjectMeta: adoptedMeta,
			Spec: corev1.ReplicationControllerSpec{Replicas: &adoptedN, Selector: adoptedSelector.MatchLabels,
				Template: &adoptedTemplate}},
		false, false},
	"DaemonSet": {daemonset.New, &appsv1.DaemonSet{ObjectMeta: adoptedMeta, Spec: appsv1.DaemonSetSpec{
		Selector: adoptedSelector, Template: adoptedTemplate}}, true, false},
	"StatefulSet": {statefulset.New, &appsv1.StatefulSet{ObjectMeta: adoptedMeta, Spec: appsv1.StatefulSetSpec{
		Replicas: &adoptedN, Selector: adoptedSelector, Template: adoptedTemplate,
		PodManagementPolicy: appsv1.ParallelPodManagement}},
		true, true},
	"Job": {job.New, &batchv1.Job{ObjectMeta: adoptedMeta, Spec: batchv1.JobSpec{
		Parallelism: &adoptedN, Completions: &adoptedN, ManualSelector: &adoptedYes, Selector: adoptedSelector,
		Template: adoptedForJob}}, true,
		false},
}

// F70: every controller of pods adopts and releases the pods that Kubernetes' controller of the kind adopts and releases.
func TestPodsAreAdoptedAsInKubernetes(t *testing.T) {
	for kind, c := range adoptedCases {
		t.Run(kind, func(t *testing.T) {
			virtual.Test(t, func(t *testing.T) {
				w := testcluster.New(t, testcluster.Options{NoMutationGuard: true,
					Controllers: func(d engine.Deps) []*engine.Descriptor {
						return []*engine.Descriptor{c.controller(d)}
					}})
				w.CreateNamespace("other")
				foreign := metav1.OwnerReference{APIVersion: "apps/v1", Kind: kind, Name: "web", UID: "another",
					Controller: &adoptedYes}
				orphanPod(w, "web-0", "default", "web", corev1.PodRunning)
				orphanPod(w, "web-1", "default", "web", corev1.PodSucceeded)
				orphanPod(w, "web-2", "default", "web", corev1.PodRunning)
				orphanPod(w, "web-3", "default", "web", corev1.PodRunning, foreign)
				orphanPod(w, "web-4", "default", "else", corev1.PodRunning)
				orphanPod(w, "web-5", "other", "web", corev1.PodRunning)
				orphanPod(w, "web-6", "default", "web", corev1.PodRunning)
				orphanPod(w, "elsewhere", "default", "web", corev1.PodRunning)
				zero := int64(0)
				if err := client.Delete[*corev1.Pod](w.Ctx, w.Admin, "default", "web-2",
					metav1.DeleteOptions{GracePeriodSeconds: &zero}); err != nil {
					t.Fatal(err)
				}
				w.CreateObject(c.owner.DeepCopyObject().(api.Object))
				w.Lead(engine.Options{})
				var adopted []string
				look := func() {
					adopted = nil
					for _, name := range []string{"web-0", "web-1", "web-2", "web-3", "web-4", "web-6", "elsewhere"} {
						if by := controllerOf(w, "default", name); by != "" && by != kind+" another" {
							adopted = append(adopted, name)
						}
					}
				}
				want := []string{"web-0"}
				if c.ended {
					want = append(want, "web-1")
				}
				want = append(want, "web-6")
				if !c.named {
					want = append(want, "elsewhere")
				}
				time.Sleep(10 * time.Second) // virtual
				if look(); !slices.Equal(adopted, want) {
					t.Fatalf("adopted are %v, want %v", adopted, want)
				}
				if by := controllerOf(w, "default", "web-3"); by != kind+" another" {
					t.Errorf("the pod of an owner with another UID is controlled by %q", by)
				}
				if by := controllerOf(w, "other", "web-5"); by != "" {
					t.Errorf("a pod of another namespace is controlled by %q", by)
				}

				setPhase(w, "default", "web-6", corev1.PodFailed)
				for _, name := range []string{"web-0", "web-6"} {
					w.Eventually("changing the labels of "+name, func() error {
						p, err := client.Get[*corev1.Pod](w.Ctx, w.Admin, "default", name)
						if err != nil {
							return err
						}
						p = p.DeepCopy()
						p.Labels["app"] = "mine"
						_, err = client.Update(w.Ctx, w.Admin, p)
						return err
					})
				}
				time.Sleep(10 * time.Second) // virtual
				if by := controllerOf(w, "default", "web-0"); by != "" {
					t.Errorf("a pod whose labels no longer match is controlled by %q", by)
				}
				if by := controllerOf(w, "default", "web-6"); (by == "") != c.ended {
					t.Errorf("a failed pod whose labels no longer match is controlled by %q", by)
				}
			})
		})
	}
}

// F70: a Job with a selector of its own counts a pod that had succeeded before the Job adopted it.
func TestAdoptedPodsOfJobsAreCounted(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w := testcluster.New(t, testcluster.Options{NoMutationGuard: true,
			Controllers: func(d engine.Deps) []*engine.Descriptor {
				return []*engine.Descriptor{job.New(d)}
			}})
		orphanPod(w, "done", "default", "web", corev1.PodSucceeded)
		template := testcluster.NewDeployment("web", 1, "web:1").Spec.Template
		template.Spec.RestartPolicy = corev1.RestartPolicyNever
		yes, n := true, int32(1)
		w.CreateObject(&batchv1.Job{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "web"},
			Spec: batchv1.JobSpec{
				Parallelism: &n, Completions: &n, ManualSelector: &yes,
				Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": "web"}},
				Template: template}})
		w.Lead(engine.Options{})
		w.Eventually("the Job completes", func() error {
			j, err := client.Get[*batchv1.Job](w.Ctx, w.Admin, "default", "web")
			if err != nil || j.Status.Succeeded != 1 || len(j.Status.Conditions) == 0 {
				return errors.Join(err, fmt.Errorf("its status is %+v", j.Status))
			}
			return nil
		})
		if pods := w.LivePods(); len(pods) != 1 {
			t.Errorf("there are %d pods, want the adopted one alone", len(pods))
		}
	})
}

// F70: a StatefulSet replaces a failed pod that it adopted: the pod has the name of a replica.
func TestAdoptedFailedReplicasAreReplaced(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w := testcluster.New(t, testcluster.Options{NoMutationGuard: true,
			Controllers: func(d engine.Deps) []*engine.Descriptor {
				return []*engine.Descriptor{statefulset.New(d)}
			}})
		orphanPod(w, "web-0", "default", "web", corev1.PodFailed)
		n := int32(1)
		w.CreateObject(&appsv1.StatefulSet{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "web"},
			Spec: appsv1.StatefulSetSpec{
				Replicas: &n, Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": "web"}},
				Template: testcluster.NewDeployment("web", 1, "web:1").Spec.Template}})
		w.Lead(engine.Options{})
		w.Eventually("deleting the failed pod", func() error {
			p, err := client.Get[*corev1.Pod](w.Ctx, w.Admin, "default", "web-0")
			if err == nil && p.DeletionTimestamp == nil {
				err = fmt.Errorf("it is not being deleted, its owners are %v", p.OwnerReferences)
			}
			return err
		})
	})
}
