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
	"keelson.dev/keelson/controlplane/controllers/deployment"
	"keelson.dev/keelson/controlplane/controllers/engine"
	"keelson.dev/keelson/controlplane/controllers/testcluster"
	"keelson.dev/keelson/internal/virtual"
)

const trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"

// F59 F60 F61 F70
func TestDeploymentKeepsItsPods(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w := testcluster.StartCluster(t, testcluster.Options{})
		d := testcluster.NewDeployment("web", 3, "web:1")
		d.Annotations = map[string]string{api.TraceParentAnnotation: trace}
		w.CreateObject(d)
		w.AwaitRollout("web", 3)
		sets, pods := w.ReplicaSets(), w.LivePods()
		if len(sets) != 1 || len(pods) != 3 {
			t.Fatalf("%d replica sets and %d pods", len(sets), len(pods))
		}
		stored, err := client.Get[*appsv1.Deployment](w.Ctx, w.Admin, "default", "web")
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
		for _, s := range w.Timeline.StagesOfTrace(api.TraceID(trace)) {
			stages[s.Name]++
		}
		if stages["replicaset created"] != 1 || stages["pod created"] != 3 {
			t.Errorf("stages: %v", stages)
		}

		// A lost pod is replaced.
		if err := client.Delete[*corev1.Pod](w.Ctx, w.Admin, "default", pods[0].Name, metav1.DeleteOptions{}); err !=
			nil {
			t.Fatal(err)
		}
		w.Eventually("replacing a pod", func() error {
			d, err := client.Get[*appsv1.Deployment](w.Ctx, w.Admin, "default", "web")
			if err != nil {
				return err
			}
			if now := w.LivePods(); len(now) != 3 || d.Status.AvailableReplicas != 3 || hasPod(now, pods[0].UID) {
				return fmt.Errorf("%d pods, status %+v", len(now), d.Status)
			}
			return nil
		})
		// Excess is removed.
		testcluster.Update(w, "web", func(d *appsv1.Deployment) { n := int32(1); d.Spec.Replicas = &n })
		w.AwaitRollout("web", 1)
		if n := len(w.LivePods()); n != 1 {
			t.Errorf("%d pods after scaling to 1", n)
		}
		w.AwaitEvent("ScalingReplicaSet", fmt.Sprintf("Scaled up replica set %s from 0 to 3", sets[0].Name))
		w.AwaitEvent("ScalingReplicaSet", fmt.Sprintf("Scaled down replica set %s from 3 to 1", sets[0].Name))
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

// F64 F78: nothing is read or written once everything is as it should be.
func TestQuietWhenDone(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w := testcluster.StartCluster(t, testcluster.Options{})
		w.CreateObject(testcluster.NewDeployment("web", 5, "web:1"))
		w.AwaitRollout("web", 5)
		w.AwaitRest()
		// Touch an object to start reconciles, and check that they write only changes.
		p := w.LivePods()[0].DeepCopy()
		p.Labels["note"] = "x"
		if _, err := client.Update(w.Ctx, w.Admin, p); err != nil {
			t.Fatal(err)
		}
		testcluster.Update(w, "web", func(d *appsv1.Deployment) { d.Labels = map[string]string{"note": "x"} })
		if err := w.Informers.WaitForSync(w.Ctx); err != nil {
			t.Fatal(err)
		}
		reads := w.Calls.Reads.Load()
		w.CreateObject(testcluster.NewDeployment("other", 1, "web:1"))
		w.AwaitRollout("other", 1)
		if n := w.Calls.Reads.Load() - reads; n != 0 {
			t.Errorf("reconciling read %d times from the API instead of the cache", n)
		}
	})
}

// F67: a template change creates a new ReplicaSet, the old one stays as history; undo makes it
// current again.
func TestRolloutAndUndo(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w := testcluster.StartCluster(t, testcluster.Options{})
		w.CreateObject(testcluster.NewDeployment("web", 4, "web:1"))
		w.AwaitRollout("web", 4)
		first := w.ReplicaSets()[0]
		testcluster.Update(w, "web", func(d *appsv1.Deployment) { d.Spec.Template.Spec.Containers[0].Image = "web:2" })
		w.AwaitRollout("web", 4)
		if n := len(w.ReplicaSets()); n != 2 {
			t.Fatalf("%d replica sets after a template change", n)
		}
		revision(w, "web", "2")
		for _, p := range w.LivePods() {
			if p.Spec.Containers[0].Image != "web:2" {
				t.Errorf("%s runs %s", p.Name, p.Spec.Containers[0].Image)
			}
		}
		testcluster.Update(w, "web", func(d *appsv1.Deployment) { d.Spec.Template.Spec.Containers[0].Image = "web:1" })
		w.AwaitRollout("web", 4)
		revision(w, "web", "3")
		if n := len(w.ReplicaSets()); n != 2 {
			t.Errorf("%d replica sets after going back", n)
		}
		back, err := client.Get[*appsv1.ReplicaSet](w.Ctx, w.Admin, "default", first.Name)
		if err != nil || *back.Spec.Replicas != 4 || back.Annotations[deployment.RevisionHistoryAnnotation] != "1" {
			t.Errorf("the first replica set is %+v, %v", back, err)
		}
	})
}

func revision(w *testcluster.Cluster, name, want string) {
	w.T.Helper()
	w.Eventually("revision of "+name, func() error {
		d, err := client.Get[*appsv1.Deployment](w.Ctx, w.Admin, "default", name)
		if err == nil && d.Annotations[deployment.RevisionAnnotation] != want {
			err = fmt.Errorf("revision %q, want %q", d.Annotations[deployment.RevisionAnnotation], want)
		}
		return err
	})
}

func TestRevisionHistoryLimit(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w := testcluster.StartCluster(t, testcluster.Options{})
		d := testcluster.NewDeployment("web", 1, "web:0")
		limit := int32(2)
		d.Spec.RevisionHistoryLimit = &limit
		w.CreateObject(d)
		for i := 1; i <= 4; i++ {
			w.AwaitRollout("web", 1)
			testcluster.Update(w, "web", func(d *appsv1.Deployment) {
				d.Spec.Template.Spec.Containers[0].Image = fmt.Sprintf("web:%d", i)
			})
		}
		w.AwaitRollout("web", 1)
		w.Eventually("old replica sets go", func() error {
			if n := len(w.ReplicaSets()); n != 3 {
				return fmt.Errorf("%d replica sets", n)
			}
			return nil
		})
	})
}

// F69: no new pod is created before every old pod is gone.
func TestRecreate(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w := testcluster.StartCluster(t, testcluster.Options{})
		d := testcluster.NewDeployment("web", 5, "web:1")
		d.Spec.Strategy.Type = appsv1.RecreateDeploymentStrategyType
		w.CreateObject(d)
		w.AwaitRollout("web", 5)
		changes, err := w.WatchPods()
		if err != nil {
			t.Fatal(err)
		}
		defer changes.Stop()
		testcluster.Update(w, "web", func(d *appsv1.Deployment) { d.Spec.Template.Spec.Containers[0].Image = "web:2" })
		w.AwaitRollout("web", 5)
		images := map[string]string{}
		for _, p := range w.PodsAtStart {
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
		w := testcluster.StartCluster(t, testcluster.Options{})
		w.CreateObject(testcluster.NewDeployment("web", 2, "web:1"))
		w.AwaitRollout("web", 2)
		testcluster.Update(w, "web", func(d *appsv1.Deployment) {
			n := int32(4)
			d.Spec.Paused, d.Spec.Replicas = true, &n
			d.Spec.Template.Spec.Containers[0].Image = "web:2"
		})
		w.Eventually("scaling while paused", func() error {
			if n := len(w.LivePods()); n != 4 {
				return fmt.Errorf("%d pods", n)
			}
			return nil
		})
		for _, p := range w.LivePods() {
			if p.Spec.Containers[0].Image != "web:1" {
				t.Fatal("a paused deployment rolled")
			}
		}
		testcluster.Update(w, "web", func(d *appsv1.Deployment) { d.Spec.Paused = false })
		w.AwaitRollout("web", 4)
		for _, p := range w.LivePods() {
			if p.Spec.Containers[0].Image != "web:2" {
				t.Fatal("a resumed deployment did not roll")
			}
		}
	})
}

// Pods without an owner are adopted by selector; a pod whose labels change is released and replaced.
func TestAdoptAndRelease(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w := testcluster.StartCluster(t, testcluster.Options{})
		orphan := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "lonely",
			Labels: map[string]string{"app": "rs"}}}
		orphan.Spec = testcluster.NewDeployment("rs", 1, "x").Spec.Template.Spec
		w.CreateObject(orphan)
		n := int32(2)
		w.CreateObject(&appsv1.ReplicaSet{
			ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "rs"},
			Spec: appsv1.ReplicaSetSpec{Replicas: &n,
				Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": "rs"}},
				Template: testcluster.NewDeployment("rs", 1, "x").Spec.Template},
		})
		w.Eventually("adopting", func() error {
			p, err := client.Get[*corev1.Pod](w.Ctx, w.Admin, "default", "lonely")
			if err == nil && (metav1.GetControllerOf(p) == nil || len(w.LivePods()) != 2) {
				err = fmt.Errorf("owners %v, %d pods", p.OwnerReferences, len(w.LivePods()))
			}
			return err
		})
		w.Eventually("changing the pod's label", func() error {
			p, err := client.Get[*corev1.Pod](w.Ctx, w.Admin, "default", "lonely")
			if err != nil {
				return err
			}
			p = p.DeepCopy()
			p.Labels["app"] = "mine"
			_, err = client.Update(w.Ctx, w.Admin, p)
			return err
		})
		w.Eventually("releasing and replacing", func() error {
			p, err := client.Get[*corev1.Pod](w.Ctx, w.Admin, "default", "lonely")
			if err == nil && (len(p.OwnerReferences) != 0 || len(w.LivePods()) != 3) {
				err = fmt.Errorf("owners %v, %d pods", p.OwnerReferences, len(w.LivePods()))
			}
			return err
		})
	})
}

// The statuses of a Deployment and its ReplicaSet count a terminating pod until it is deleted.
func TestTerminatingReplicas(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w := testcluster.StartCluster(t, testcluster.Options{})
		w.CreateObject(testcluster.NewDeployment("web", 1, "web:1"))
		w.AwaitRollout("web", 1)
		gone := w.LivePods()[0]
		w.LoseNode(gone.Spec.NodeName)
		tells := func(n int32) {
			w.Eventually(fmt.Sprintf("%d are told of", n), func() error {
				d, err := client.Get[*appsv1.Deployment](w.Ctx, w.Admin, "default", "web")
				if err != nil {
					return err
				}
				for _, told := range []*int32{d.Status.TerminatingReplicas,
					w.ReplicaSets()[0].Status.TerminatingReplicas} {
					if told == nil || *told != n {
						return fmt.Errorf("%v, %+v", d.Status, w.ReplicaSets()[0].Status)
					}
				}
				return nil
			})
		}
		tells(0)
		o := engine.DeleteOnlyUID(gone)
		if err := client.Delete[*corev1.Pod](w.Ctx, w.Admin, "default", gone.Name, o); err != nil {
			t.Fatal(err)
		}
		tells(1)
		o.GracePeriodSeconds = new(int64)
		if err := client.Delete[*corev1.Pod](w.Ctx, w.Admin, "default", gone.Name, o); err != nil {
			t.Fatal(err)
		}
		tells(0)
	})
}

// A Deployment with automatic rollback returns to its last complete revision if a rollout takes too
// long or its new pods crash; its old pods serve all the time.
func TestRollbackOnFailure(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w := testcluster.StartCluster(t, testcluster.Options{})
		d := testcluster.NewDeployment("web", 2, "web:1")
		d.Annotations = map[string]string{api.RollbackAnnotation: "true"}
		w.CreateObject(d)
		w.AwaitRollout("web", 2)
		completed := func(revision string) {
			w.Eventually("revision "+revision+" is remembered", func() error {
				d, err := client.Get[*appsv1.Deployment](w.Ctx, w.Admin, "default", "web")
				if err == nil && d.Annotations[deployment.CompletedAnnotation] != revision {
					err = fmt.Errorf("%v", d.Annotations)
				}
				return err
			})
		}
		back := func() {
			w.EventuallyWithin(20*time.Second, "back", func() error {
				d, err := client.Get[*appsv1.Deployment](w.Ctx, w.Admin, "default", "web")
				if err == nil && d.Spec.Template.Spec.Containers[0].Image != "web:1" {
					err = fmt.Errorf("%+v", d.Status)
				}
				return err
			})
			w.AwaitRollout("web", 2)
		}
		completed("1")
		w.Nodes.Mark(w.Nodes.Held, "web", true)
		one := int32(1)
		testcluster.Update(w, "web", func(d *appsv1.Deployment) {
			d.Spec.Template.Spec.Containers[0].Image, d.Spec.ProgressDeadlineSeconds = "web:2", &one
		})
		back()
		completed("3")
		many := int32(600)
		testcluster.Update(w, "web", func(d *appsv1.Deployment) {
			d.Spec.Template.Spec.Containers[0].Image, d.Spec.ProgressDeadlineSeconds = "web:3", &many
		})
		name := ""
		w.Eventually("a new pod crashes", func() error {
			for _, p := range w.LivePods() {
				if p.Spec.Containers[0].Image != "web:3" {
					continue
				}
				p = p.DeepCopy()
				p.Status.ContainerStatuses = []corev1.ContainerStatus{{Name: "c", Image: "web:3", RestartCount: 3,
					State: corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: "CrashLoopBackOff"}}}}
				name = p.Name
				_, err := client.UpdateStatus(w.Ctx, w.Admin, p)
				return err
			}
			return errors.New("there is none")
		})
		back()
		w.AwaitEvent("DeploymentRollback", fmt.Sprintf("Rolled back to revision 3: Pod %q exits repeatedly.", name))
	})
}
