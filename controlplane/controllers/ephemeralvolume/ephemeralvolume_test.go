package ephemeralvolume_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/controllers/engine"
	"keelson.dev/keelson/controlplane/controllers/testcluster"
)

// ephemeralPod is a pod with an ephemeral volume "tmp" of a size.
func ephemeralPod(name, size string) *corev1.Pod {
	p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name},
		Spec: testcluster.NewDeployment("x", 1, "x").Spec.Template.Spec}
	p.Spec.Volumes = []corev1.Volume{{Name: "tmp",
		VolumeSource: corev1.VolumeSource{Ephemeral: &corev1.EphemeralVolumeSource{
			VolumeClaimTemplate: &corev1.PersistentVolumeClaimTemplate{Spec: testcluster.NewClaim("", size).Spec}}}}}
	return p
}

// ownClaim is nil when the claim of the pod's volume "tmp" is there and the pod's own.
func ownClaim(w *testcluster.Cluster, pod string) error {
	p, err := client.Get[*corev1.Pod](w.Ctx, w.Admin, "default", pod)
	if err != nil {
		return err
	}
	c, err := client.Get[*corev1.PersistentVolumeClaim](w.Ctx, w.Admin, "default", pod+"-tmp")
	if err != nil {
		return err
	}
	if !metav1.IsControlledBy(c, p) || c.DeletionTimestamp != nil {
		return fmt.Errorf("claim %s has owners %v, deleted %v", c.Name, c.OwnerReferences, c.DeletionTimestamp)
	}
	return nil
}

// A pod's ephemeral volume gets its own claim. It is bound to an existing volume, is created again
// if it is deleted early, and is deleted with the pod. Another claim of that name is reported and
// never used.
func TestEphemeralVolumes(t *testing.T) {
	w := testcluster.StartCluster(t, testcluster.Options{})
	w.CreateObject(testcluster.NewVolume("v", "2Gi"))
	w.CreateObject(ephemeralPod("web", "1Gi"))
	w.Eventually("the claim", func() error { return ownClaim(w, "web") })
	w.Eventually("the volume", func() error { return w.CheckVolumePhase("v", corev1.VolumeBound) })
	if err := client.Delete[*corev1.Pod](w.Ctx, w.Admin, "default", "web", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	w.Eventually("the claim goes with its pod", func() error {
		return testcluster.CheckGone[*corev1.PersistentVolumeClaim](w, "web-tmp")
	})
	w.Eventually("the volume is released", func() error { return w.CheckVolumePhase("v", corev1.VolumeReleased) })

	w.CreateObject(testcluster.NewClaim("db-tmp", "1Gi")) // another owner's claim
	w.CreateObject(ephemeralPod("db", "1Gi"))
	w.Eventually("an Event about the conflict", func() error {
		list, err := client.List[*corev1.Event](w.Ctx, w.Admin, "default", metav1.ListOptions{})
		if err != nil {
			return err
		}
		for _, e := range list {
			if e.Reason == "FailedBinding" && e.InvolvedObject.Kind == "Pod" && strings.Contains(e.Message,
				"ephemeral volume tmp: PVC default/db-tmp was not created for pod default/db (pod is not owner)") {
				return nil
			}
		}
		return errors.New("no event")
	})
	if c, err := client.Get[*corev1.PersistentVolumeClaim](w.Ctx, w.Admin, "default", "db-tmp"); err != nil ||
		len(c.OwnerReferences) > 0 {
		t.Errorf("somebody's claim was taken: %v, %v", c, err)
	}
}

// Regardless of lost calls, crashes and leader changes: each pod has its own claim at the end, even
// if a pod of the same name existed before, and no claim outlives its pod.
func TestEphemeralVolumesUnderFailures(t *testing.T) {
	w := testcluster.New(t, testcluster.Options{NoMutationGuard: true,
		ChangeController: testcluster.FailReconcilesAmong("ephemeral-volume-controller", 2, time.Millisecond)})
	settings := engine.Options{Resync: 30 * time.Millisecond}
	stop := w.Lead(settings)
	w.AddNode("w1")
	const pods = 8
	for round := range 3 {
		for i := range pods {
			w.CreateObject(ephemeralPod(fmt.Sprint("p", i), "1Gi"))
		}
		stop()
		stop = w.Lead(settings)
		for i := range pods {
			w.EventuallyWithin(20*time.Second, "the claim", func() error { return ownClaim(w, fmt.Sprint("p", i)) })
		}
		if round == 2 {
			break
		}
		for i := range pods {
			now := int64(0)
			err := client.Delete[*corev1.Pod](w.Ctx, w.Admin, "default", fmt.Sprint("p", i),
				metav1.DeleteOptions{GracePeriodSeconds: &now})
			if err != nil && !apierrors.IsNotFound(err) {
				t.Fatal(err)
			}
		}
		w.EventuallyWithin(20*time.Second, "the pods go", func() error {
			if n := len(w.LivePods()); n > 0 {
				return fmt.Errorf("%d pods", n)
			}
			return nil
		})
	}
	for i := range pods {
		if err := client.Delete[*corev1.Pod](w.Ctx, w.Admin, "default", fmt.Sprint("p", i),
			metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		w.EventuallyWithin(20*time.Second, "the claim goes", func() error {
			return testcluster.CheckGone[*corev1.PersistentVolumeClaim](w, fmt.Sprintf("p%d-tmp", i))
		})
	}
}
