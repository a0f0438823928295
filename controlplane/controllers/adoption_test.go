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
	"keelson.dev/keelson/controlplane/controllers"
	"keelson.dev/keelson/controlplane/controllers/daemonset"
	"keelson.dev/keelson/controlplane/controllers/job"
	"keelson.dev/keelson/controlplane/controllers/replicaset"
	"keelson.dev/keelson/controlplane/controllers/statefulset"
	"keelson.dev/keelson/internal/virtual"
)

// orphanPod creates a pod with a finalizer, so that the pod stays even if a controller deletes it.
func (w *world) orphanPod(name, namespace, label string, phase corev1.PodPhase, owners ...metav1.OwnerReference) {
	w.t.Helper()
	p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name, Labels: map[string]string{"app": label},
		Finalizers: []string{"example.com/hold"}, OwnerReferences: owners}}
	p.Spec = app("web", 1, "web:1").Spec.Template.Spec
	made, err := client.Create(w.ctx, w.admin, p)
	if err != nil {
		w.t.Fatal(err)
	}
	w.setPhase(made.Namespace, name, phase)
}

func (w *world) setPhase(namespace, name string, phase corev1.PodPhase) {
	w.t.Helper()
	w.eventually("the phase of "+name, func() error {
		p, err := client.Get[*corev1.Pod](w.ctx, w.admin, namespace, name)
		if err != nil {
			return err
		}
		p = p.DeepCopy()
		p.Status.Phase = phase
		_, err = client.UpdateStatus(w.ctx, w.admin, p)
		return err
	})
}

// controllerOf returns the kind and UID of a pod's controller; "" if it has none.
func (w *world) controllerOf(namespace, name string) string {
	w.t.Helper()
	p, err := client.Get[*corev1.Pod](w.ctx, w.admin, namespace, name)
	if err != nil {
		w.t.Fatal(err)
	}
	if ref := metav1.GetControllerOf(p); ref != nil {
		return ref.Kind + " " + string(ref.UID)
	}
	return ""
}

// F70: every controller of pods adopts and releases the pods that Kubernetes' controller of the kind adopts and releases.
func TestPodsAreAdoptedAsInKubernetes(t *testing.T) {
	n := int32(10)
	yes := true
	meta := metav1.ObjectMeta{Namespace: "default", Name: "web"}
	selector := &metav1.LabelSelector{MatchLabels: map[string]string{"app": "web"}}
	template := app("web", 1, "web:1").Spec.Template
	forJob := *template.DeepCopy()
	forJob.Spec.RestartPolicy = corev1.RestartPolicyNever
	for kind, c := range map[string]struct {
		controller func(controllers.Deps) *controllers.Controller
		owner      api.Object
		ended      bool // ended pods are adopted and released
		named      bool // only pods with the owner's ordinals are adopted
	}{
		"ReplicaSet": {replicaset.New, &appsv1.ReplicaSet{ObjectMeta: meta, Spec: appsv1.ReplicaSetSpec{
			Replicas: &n, Selector: selector, Template: template}}, false, false},
		"ReplicationController": {replicaset.NewForReplicationControllers, &corev1.ReplicationController{ObjectMeta: meta,
			Spec: corev1.ReplicationControllerSpec{Replicas: &n, Selector: selector.MatchLabels, Template: &template}}, false, false},
		"DaemonSet": {daemonset.New, &appsv1.DaemonSet{ObjectMeta: meta, Spec: appsv1.DaemonSetSpec{
			Selector: selector, Template: template}}, true, false},
		"StatefulSet": {statefulset.New, &appsv1.StatefulSet{ObjectMeta: meta, Spec: appsv1.StatefulSetSpec{
			Replicas: &n, Selector: selector, Template: template, PodManagementPolicy: appsv1.ParallelPodManagement}}, true, true},
		"Job": {job.New, &batchv1.Job{ObjectMeta: meta, Spec: batchv1.JobSpec{
			Parallelism: &n, Completions: &n, ManualSelector: &yes, Selector: selector, Template: forJob}}, true, false},
	} {
		t.Run(kind, func(t *testing.T) {
			virtual.Test(t, func(t *testing.T) {
				w := newWorld(t, options{quiet: true, only: func(d controllers.Deps) []*controllers.Controller {
					return []*controllers.Controller{c.controller(d)}
				}})
				w.create(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "other"}})
				foreign := metav1.OwnerReference{APIVersion: "apps/v1", Kind: kind, Name: "web", UID: "another", Controller: &yes}
				w.orphanPod("web-0", "default", "web", corev1.PodRunning)
				w.orphanPod("web-1", "default", "web", corev1.PodSucceeded)
				w.orphanPod("web-2", "default", "web", corev1.PodRunning)
				w.orphanPod("web-3", "default", "web", corev1.PodRunning, foreign)
				w.orphanPod("web-4", "default", "else", corev1.PodRunning)
				w.orphanPod("web-5", "other", "web", corev1.PodRunning)
				w.orphanPod("web-6", "default", "web", corev1.PodRunning)
				w.orphanPod("elsewhere", "default", "web", corev1.PodRunning)
				zero := int64(0)
				if err := client.Delete[*corev1.Pod](w.ctx, w.admin, "default", "web-2", metav1.DeleteOptions{GracePeriodSeconds: &zero}); err != nil {
					t.Fatal(err)
				}
				w.create(c.owner.DeepCopyObject().(api.Object))
				w.lead(controllers.Options{})
				var adopted []string
				look := func() {
					adopted = nil
					for _, name := range []string{"web-0", "web-1", "web-2", "web-3", "web-4", "web-6", "elsewhere"} {
						if by := w.controllerOf("default", name); by != "" && by != kind+" another" {
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
				if by := w.controllerOf("default", "web-3"); by != kind+" another" {
					t.Errorf("the pod of an owner with another UID is controlled by %q", by)
				}
				if by := w.controllerOf("other", "web-5"); by != "" {
					t.Errorf("a pod of another namespace is controlled by %q", by)
				}

				w.setPhase("default", "web-6", corev1.PodFailed)
				for _, name := range []string{"web-0", "web-6"} {
					w.eventually("changing the labels of "+name, func() error {
						p, err := client.Get[*corev1.Pod](w.ctx, w.admin, "default", name)
						if err != nil {
							return err
						}
						p = p.DeepCopy()
						p.Labels["app"] = "mine"
						_, err = client.Update(w.ctx, w.admin, p)
						return err
					})
				}
				time.Sleep(10 * time.Second) // virtual
				if by := w.controllerOf("default", "web-0"); by != "" {
					t.Errorf("a pod whose labels no longer match is controlled by %q", by)
				}
				if by := w.controllerOf("default", "web-6"); (by == "") != c.ended {
					t.Errorf("a failed pod whose labels no longer match is controlled by %q", by)
				}
			})
		})
	}
}

// F70: a Job with a selector of its own counts a pod that had succeeded before the Job adopted it.
func TestAdoptedPodsOfJobsAreCounted(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w := newWorld(t, options{quiet: true, only: func(d controllers.Deps) []*controllers.Controller {
			return []*controllers.Controller{job.New(d)}
		}})
		w.orphanPod("done", "default", "web", corev1.PodSucceeded)
		template := app("web", 1, "web:1").Spec.Template
		template.Spec.RestartPolicy = corev1.RestartPolicyNever
		yes, n := true, int32(1)
		w.create(&batchv1.Job{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "web"}, Spec: batchv1.JobSpec{
			Parallelism: &n, Completions: &n, ManualSelector: &yes, Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": "web"}},
			Template: template}})
		w.lead(controllers.Options{})
		w.eventually("the Job completes", func() error {
			j, err := client.Get[*batchv1.Job](w.ctx, w.admin, "default", "web")
			if err != nil || j.Status.Succeeded != 1 || len(j.Status.Conditions) == 0 {
				return errors.Join(err, fmt.Errorf("its status is %+v", j.Status))
			}
			return nil
		})
		if pods := w.pods(); len(pods) != 1 {
			t.Errorf("there are %d pods, want the adopted one alone", len(pods))
		}
	})
}

// F70: a StatefulSet replaces a failed pod that it adopted: the pod has the name of a replica.
func TestAdoptedFailedReplicasAreReplaced(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w := newWorld(t, options{quiet: true, only: func(d controllers.Deps) []*controllers.Controller {
			return []*controllers.Controller{statefulset.New(d)}
		}})
		w.orphanPod("web-0", "default", "web", corev1.PodFailed)
		n := int32(1)
		w.create(&appsv1.StatefulSet{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "web"}, Spec: appsv1.StatefulSetSpec{
			Replicas: &n, Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": "web"}}, Template: app("web", 1, "web:1").Spec.Template}})
		w.lead(controllers.Options{})
		w.eventually("deleting the failed pod", func() error {
			p, err := client.Get[*corev1.Pod](w.ctx, w.admin, "default", "web-0")
			if err == nil && p.DeletionTimestamp == nil {
				err = fmt.Errorf("it is not being deleted, its owners are %v", p.OwnerReferences)
			}
			return err
		})
	})
}
