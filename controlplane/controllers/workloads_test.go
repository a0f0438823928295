package controllers_test

import (
	"errors"
	"fmt"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/controllers"
	"keelson.dev/keelson/controlplane/controllers/deployment"
	"keelson.dev/keelson/internal/virtual"
)

const trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"

// F59 F60 F61 F70
func TestDeploymentKeepsItsPods(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w := start(t, options{})
		d := app("web", 3, "web:1")
		d.Annotations = map[string]string{api.TraceParentAnnotation: trace}
		w.create(d)
		w.rolledOut("web", 3)
		sets, pods := w.sets(), w.pods()
		if len(sets) != 1 || len(pods) != 3 {
			t.Fatalf("%d replica sets and %d pods", len(sets), len(pods))
		}
		stored, err := client.Get[*appsv1.Deployment](w.ctx, w.admin, "default", "web")
		if err != nil {
			t.Fatal(err)
		}
		if ref := metav1.GetControllerOf(sets[0]); ref == nil || ref.UID != stored.UID {
			t.Errorf("the replica set's controller is %v", ref)
		}
		for _, p := range pods {
			if ref := metav1.GetControllerOf(p); ref == nil || ref.UID != sets[0].UID {
				t.Errorf("controller of %s is %v", p.Name, ref)
			}
			if p.Annotations[api.TraceParentAnnotation] != trace {
				t.Errorf("%s does not carry the trace", p.Name)
			}
			if p.Labels[appsv1.DefaultDeploymentUniqueLabelKey] == "" {
				t.Errorf("%s lacks the template hash", p.Name)
			}
		}
		if a := sets[0].Spec.Template.Annotations[api.TraceParentAnnotation]; a != "" {
			t.Error("the trace is in the template")
		}
		stages := map[string]int{}
		for _, s := range w.timeline.Find(api.TraceID(trace)) {
			stages[s.Name]++
		}
		if stages["replicaset created"] != 1 || stages["pod created"] != 3 {
			t.Errorf("stages: %v", stages)
		}

		// A lost pod is replaced.
		if err := client.Delete[*corev1.Pod](w.ctx, w.admin, "default", pods[0].Name, metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		w.eventually("replacing a pod", func() error {
			d, err := client.Get[*appsv1.Deployment](w.ctx, w.admin, "default", "web")
			if err != nil {
				return err
			}
			if now := w.pods(); len(now) != 3 || d.Status.AvailableReplicas != 3 || hasPod(now, pods[0].UID) {
				return fmt.Errorf("%d pods, status %+v", len(now), d.Status)
			}
			return nil
		})
		// Excess is removed.
		update(w, "web", func(d *appsv1.Deployment) { n := int32(1); d.Spec.Replicas = &n })
		w.rolledOut("web", 1)
		if n := len(w.pods()); n != 1 {
			t.Errorf("%d pods after scaling to 1", n)
		}
		w.event("ScalingReplicaSet", fmt.Sprintf("Scaled up replica set %s from 0 to 3", sets[0].Name))
		w.event("ScalingReplicaSet", fmt.Sprintf("Scaled down replica set %s from 3 to 1", sets[0].Name))
	})
}

func hasPod[T ~string](pods []*corev1.Pod, uid T) bool {
	for _, p := range pods {
		if string(p.UID) == string(uid) {
			return true
		}
	}
	return false
}

// event waits for an Event with this reason and message.
func (w *world) event(reason, message string) {
	w.t.Helper()
	w.eventually("event "+reason, func() error {
		list, err := client.List[*corev1.Event](w.ctx, w.admin, "", metav1.ListOptions{})
		if err != nil {
			return err
		}
		seen := ""
		for _, e := range list {
			if e.Reason == reason && e.Message == message {
				return nil
			}
			seen += e.Reason + ": " + e.Message + "\n"
		}
		return fmt.Errorf("%q is not among:\n%s", message, seen)
	})
}

// F64 F78: nothing is read or written once everything is as it should be.
func TestQuietWhenDone(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w := start(t, options{})
		w.create(app("web", 5, "web:1"))
		w.rolledOut("web", 5)
		w.atRest()
		// Touch an object to start reconciles, and check that they write only changes.
		p := w.pods()[0].DeepCopy()
		p.Labels["note"] = "x"
		if _, err := client.Update(w.ctx, w.admin, p); err != nil {
			t.Fatal(err)
		}
		update(w, "web", func(d *appsv1.Deployment) { d.Labels = map[string]string{"note": "x"} })
		if err := w.informers.WaitForSync(w.ctx); err != nil {
			t.Fatal(err)
		}
		reads := w.calls.reads.Load()
		w.create(app("other", 1, "web:1"))
		w.rolledOut("other", 1)
		if n := w.calls.reads.Load() - reads; n != 0 {
			t.Errorf("reconciling read %d times from the API instead of the cache", n)
		}
	})
}

// atRest waits until the controllers have made no call for a few polls.
func (w *world) atRest() {
	w.t.Helper()
	var calls int64
	quiet := 0
	w.eventually("coming to rest", func() error {
		now := w.calls.reads.Load() + w.calls.writes.Load()
		if quiet++; now != calls {
			calls, quiet = now, 0
		}
		if quiet < 5 {
			return errors.New("still moving")
		}
		return nil
	})
}

// F67: a template change creates a new ReplicaSet, the old one stays as history; undo makes it
// current again.
func TestRolloutAndUndo(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w := start(t, options{})
		w.create(app("web", 4, "web:1"))
		w.rolledOut("web", 4)
		first := w.sets()[0]
		update(w, "web", func(d *appsv1.Deployment) { d.Spec.Template.Spec.Containers[0].Image = "web:2" })
		w.rolledOut("web", 4)
		if n := len(w.sets()); n != 2 {
			t.Fatalf("%d replica sets after a template change", n)
		}
		w.revision("web", "2")
		for _, p := range w.pods() {
			if p.Spec.Containers[0].Image != "web:2" {
				t.Errorf("%s runs %s", p.Name, p.Spec.Containers[0].Image)
			}
		}
		update(w, "web", func(d *appsv1.Deployment) { d.Spec.Template.Spec.Containers[0].Image = "web:1" })
		w.rolledOut("web", 4)
		w.revision("web", "3")
		if n := len(w.sets()); n != 2 {
			t.Errorf("%d replica sets after going back", n)
		}
		back, err := client.Get[*appsv1.ReplicaSet](w.ctx, w.admin, "default", first.Name)
		if err != nil || *back.Spec.Replicas != 4 || back.Annotations[deployment.RevisionHistoryAnnotation] != "1" {
			t.Errorf("the first replica set is %+v, %v", back, err)
		}
	})
}

func (w *world) revision(name, want string) {
	w.t.Helper()
	w.eventually("revision of "+name, func() error {
		d, err := client.Get[*appsv1.Deployment](w.ctx, w.admin, "default", name)
		if err == nil && d.Annotations[deployment.RevisionAnnotation] != want {
			err = fmt.Errorf("revision %q, want %q", d.Annotations[deployment.RevisionAnnotation], want)
		}
		return err
	})
}

func TestRevisionHistoryLimit(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w := start(t, options{})
		d := app("web", 1, "web:0")
		limit := int32(2)
		d.Spec.RevisionHistoryLimit = &limit
		w.create(d)
		for i := 1; i <= 4; i++ {
			w.rolledOut("web", 1)
			update(w, "web", func(d *appsv1.Deployment) { d.Spec.Template.Spec.Containers[0].Image = fmt.Sprintf("web:%d", i) })
		}
		w.rolledOut("web", 1)
		w.eventually("old replica sets go", func() error {
			if n := len(w.sets()); n != 3 {
				return fmt.Errorf("%d replica sets", n)
			}
			return nil
		})
	})
}

// F69: no new pod is created before every old pod is gone.
func TestRecreate(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w := start(t, options{})
		d := app("web", 5, "web:1")
		d.Spec.Strategy.Type = appsv1.RecreateDeploymentStrategyType
		w.create(d)
		w.rolledOut("web", 5)
		changes, err := w.watchPods()
		if err != nil {
			t.Fatal(err)
		}
		defer changes.Stop()
		update(w, "web", func(d *appsv1.Deployment) { d.Spec.Template.Spec.Containers[0].Image = "web:2" })
		w.rolledOut("web", 5)
		images := map[string]string{}
		for _, p := range w.podsAtStart {
			images[string(p.UID)] = p.Spec.Containers[0].Image
		}
		created := 0
		for created < 5 {
			select {
			case e := <-changes.ResultChan():
				p, ok := e.Object.(*corev1.Pod)
				if !ok {
					continue
				}
				switch e.Type {
				case "ADDED":
					images[string(p.UID)] = p.Spec.Containers[0].Image
					created++
					for _, image := range images {
						if image == "web:1" {
							t.Fatalf("pod %s was created while an old one was there", p.Name)
						}
					}
				case "DELETED":
					delete(images, string(p.UID))
				}
			case <-time.After(10 * time.Second):
				t.Fatalf("only %d new pods", created)
			}
		}
	})
}

// A paused Deployment scales but does not roll; resuming rolls.
func TestPause(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w := start(t, options{})
		w.create(app("web", 2, "web:1"))
		w.rolledOut("web", 2)
		update(w, "web", func(d *appsv1.Deployment) {
			n := int32(4)
			d.Spec.Paused, d.Spec.Replicas = true, &n
			d.Spec.Template.Spec.Containers[0].Image = "web:2"
		})
		w.eventually("scaling while paused", func() error {
			if n := len(w.pods()); n != 4 {
				return fmt.Errorf("%d pods", n)
			}
			return nil
		})
		for _, p := range w.pods() {
			if p.Spec.Containers[0].Image != "web:1" {
				t.Fatal("a paused deployment rolled")
			}
		}
		update(w, "web", func(d *appsv1.Deployment) { d.Spec.Paused = false })
		w.rolledOut("web", 4)
		for _, p := range w.pods() {
			if p.Spec.Containers[0].Image != "web:2" {
				t.Fatal("a resumed deployment did not roll")
			}
		}
	})
}

// Pods without an owner are adopted by selector; a pod whose labels change is released and replaced.
func TestAdoptAndRelease(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w := start(t, options{})
		orphan := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "lonely", Labels: map[string]string{"app": "rs"}}}
		orphan.Spec = app("rs", 1, "x").Spec.Template.Spec
		w.create(orphan)
		n := int32(2)
		w.create(&appsv1.ReplicaSet{
			ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "rs"},
			Spec: appsv1.ReplicaSetSpec{Replicas: &n, Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": "rs"}},
				Template: app("rs", 1, "x").Spec.Template},
		})
		w.eventually("adopting", func() error {
			p, err := client.Get[*corev1.Pod](w.ctx, w.admin, "default", "lonely")
			if err == nil && (metav1.GetControllerOf(p) == nil || len(w.pods()) != 2) {
				err = fmt.Errorf("owners %v, %d pods", p.OwnerReferences, len(w.pods()))
			}
			return err
		})
		w.eventually("changing the pod's label", func() error {
			p, err := client.Get[*corev1.Pod](w.ctx, w.admin, "default", "lonely")
			if err != nil {
				return err
			}
			p = p.DeepCopy()
			p.Labels["app"] = "mine"
			_, err = client.Update(w.ctx, w.admin, p)
			return err
		})
		w.eventually("releasing and replacing", func() error {
			p, err := client.Get[*corev1.Pod](w.ctx, w.admin, "default", "lonely")
			if err == nil && (len(p.OwnerReferences) != 0 || len(w.pods()) != 3) {
				err = fmt.Errorf("owners %v, %d pods", p.OwnerReferences, len(w.pods()))
			}
			return err
		})
	})
}

// The statuses of a Deployment and its ReplicaSet count a terminating pod until it is deleted.
func TestTerminatingReplicas(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w := start(t, options{})
		w.create(app("web", 1, "web:1"))
		w.rolledOut("web", 1)
		gone := w.pods()[0]
		w.lose(gone.Spec.NodeName)
		tells := func(n int32) {
			w.eventually(fmt.Sprintf("%d are told of", n), func() error {
				d, err := client.Get[*appsv1.Deployment](w.ctx, w.admin, "default", "web")
				if err != nil {
					return err
				}
				for _, told := range []*int32{d.Status.TerminatingReplicas, w.sets()[0].Status.TerminatingReplicas} {
					if told == nil || *told != n {
						return fmt.Errorf("%v, %+v", d.Status, w.sets()[0].Status)
					}
				}
				return nil
			})
		}
		tells(0)
		o := controllers.DeleteOnlyUID(gone)
		if err := client.Delete[*corev1.Pod](w.ctx, w.admin, "default", gone.Name, o); err != nil {
			t.Fatal(err)
		}
		tells(1)
		o.GracePeriodSeconds = new(int64)
		if err := client.Delete[*corev1.Pod](w.ctx, w.admin, "default", gone.Name, o); err != nil {
			t.Fatal(err)
		}
		tells(0)
	})
}

// A Deployment with automatic rollback returns to its last complete revision if a rollout takes too
// long or its new pods crash; its old pods serve all the time.
func TestRollbackOnFailure(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w := start(t, options{})
		d := app("web", 2, "web:1")
		d.Annotations = map[string]string{api.RollbackAnnotation: "true"}
		w.create(d)
		w.rolledOut("web", 2)
		completed := func(revision string) {
			w.eventually("revision "+revision+" is remembered", func() error {
				d, err := client.Get[*appsv1.Deployment](w.ctx, w.admin, "default", "web")
				if err == nil && d.Annotations[deployment.CompletedAnnotation] != revision {
					err = fmt.Errorf("%v", d.Annotations)
				}
				return err
			})
		}
		back := func() {
			w.within(20*time.Second, "back", func() error {
				d, err := client.Get[*appsv1.Deployment](w.ctx, w.admin, "default", "web")
				if err == nil && d.Spec.Template.Spec.Containers[0].Image != "web:1" {
					err = fmt.Errorf("%+v", d.Status)
				}
				return err
			})
			w.rolledOut("web", 2)
		}
		completed("1")
		w.nodes.set(w.nodes.held, "web", true)
		one := int32(1)
		update(w, "web", func(d *appsv1.Deployment) {
			d.Spec.Template.Spec.Containers[0].Image, d.Spec.ProgressDeadlineSeconds = "web:2", &one
		})
		back()
		completed("3")
		many := int32(600)
		update(w, "web", func(d *appsv1.Deployment) {
			d.Spec.Template.Spec.Containers[0].Image, d.Spec.ProgressDeadlineSeconds = "web:3", &many
		})
		name := ""
		w.eventually("a new pod crashes", func() error {
			for _, p := range w.pods() {
				if p.Spec.Containers[0].Image != "web:3" {
					continue
				}
				p = p.DeepCopy()
				p.Status.ContainerStatuses = []corev1.ContainerStatus{{Name: "c", Image: "web:3", RestartCount: 3,
					State: corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: "CrashLoopBackOff"}}}}
				name = p.Name
				_, err := client.UpdateStatus(w.ctx, w.admin, p)
				return err
			}
			return errors.New("there is none")
		})
		back()
		w.event("DeploymentRollback", fmt.Sprintf("Rolled back to revision 3: Pod %q ends again and again.", name))
	})
}
