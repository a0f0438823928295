package controllers_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/controllers"
	"keelson.dev/keelson/internal/virtual"
)

// driven is a volume of a CSI driver.
func driven(name, driver string) *corev1.PersistentVolume {
	v := volume(name, "1Gi")
	v.Spec.HostPath = nil
	v.Spec.CSI = &corev1.CSIPersistentVolumeSource{Driver: driver, VolumeHandle: name}
	return v
}

// boundTo waits until a claim is bound.
func (w *world) boundTo(name string) {
	w.t.Helper()
	w.claimIs(name, func(c *corev1.PersistentVolumeClaim) bool { return c.Status.Phase == corev1.ClaimBound })
}

func (w *world) claimIs(name string, is func(c *corev1.PersistentVolumeClaim) bool) {
	w.t.Helper()
	w.within(time.Minute, "claim "+name, func() error {
		c, err := client.Get[*corev1.PersistentVolumeClaim](w.ctx, w.admin, "default", name)
		if err == nil && !is(c) {
			err = fmt.Errorf("it is %+v", c.Status)
		}
		return err
	})
}

func (w *world) wants(claim, size string) {
	w.t.Helper()
	update(w, claim, func(c *corev1.PersistentVolumeClaim) { c.Spec.Resources.Requests = storage(size) })
}

func has(size string) func(c *corev1.PersistentVolumeClaim) bool {
	return func(c *corev1.PersistentVolumeClaim) bool {
		q := storage(size)[corev1.ResourceStorage]
		return q.Cmp(c.Status.Capacity[corev1.ResourceStorage]) == 0 && len(c.Status.Conditions) == 0 && len(c.Status.AllocatedResourceStatuses) == 0
	}
}

// A claim that requests more gets it from the cluster's own driver. For another driver, one event
// names the controller for which it waits.
func TestClaimsGrow(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w := start(t, options{engine: controllers.Options{OwnIdentity: true, Resync: time.Minute}, quiet: true})
		w.driverOn("w1", "w2", "w3")
		for name, driver := range map[string]string{"own": "local.csi.keelson.dev", "theirs": "other.example.com"} {
			v, c := driven(name, driver), claim(name, "1Gi")
			c.Spec.VolumeName = name
			w.create(v)
			w.create(c)
			w.boundTo(name)
			w.wants(name, "3Gi")
		}
		w.claimIs("own", has("3Gi"))
		if m := w.drivers.get("own"); m == nil || m.size != 3<<30 {
			t.Errorf("the driver has %+v", m)
		}
		w.event("VolumeResizeSuccessful", "volume own has 3Gi")
		w.event("ExternalExpanding", "waiting for an external controller to expand volume theirs to 3Gi: that of CSI driver other.example.com")
		time.Sleep(10 * time.Minute)
		w.atRest()
		list, err := client.Get[*corev1.PersistentVolume](w.ctx, w.admin, "", "theirs")
		if q := storage("1Gi")[corev1.ResourceStorage]; err != nil || q.Cmp(list.Spec.Capacity[corev1.ResourceStorage]) != 0 {
			t.Errorf("another's volume was changed: %+v, %v", list, err)
		}
		w.claimIs("theirs", has("1Gi"))
	})
}

// Regardless of lost calls, crashes and leader changes, at the end a claim has the size that it
// requested last.
func TestClaimsGrowUnderFailures(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w := newWorld(t, options{quiet: true, change: failing("expand-controller", 2, time.Millisecond)})
		engine := controllers.Options{Resync: time.Second}
		stop := w.lead(engine)
		defer func() { stop() }()
		w.node("w1")
		w.driverOn("w1")
		w.create(driven("own", "local.csi.keelson.dev"))
		w.create(claim("own", "1Gi"))
		w.boundTo("own")
		for i := range 12 {
			w.wants("own", fmt.Sprintf("%dGi", i+2))
			if i%2 == 1 {
				stop()
				stop = w.lead(engine)
			}
			if i%3 == 2 {
				w.claimIs("own", has(fmt.Sprintf("%dGi", i+2)))
			}
		}
		w.claimIs("own", has("13Gi"))
	})
}

// A volume is expanded on nodes where a pod has it mounted, and not before. Errors of nodes are
// reported, and a claim that requested too much may request less.
func TestClaimsGrowOnNodes(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w := start(t, options{engine: controllers.Options{OwnIdentity: true, Resync: time.Minute}, quiet: true})
		w.driverOn("w1", "w2", "w3")
		w.drivers.set(func() { w.drivers.onNodes = status.Error(codes.FailedPrecondition, "not while it is mounted") })
		w.create(driven("own", "local.csi.keelson.dev"))
		w.create(claim("own", "1Gi"))
		w.boundTo("own")
		w.wants("own", "900Pi")
		says := func(state corev1.ClaimResourceStatus, kind corev1.PersistentVolumeClaimConditionType, words string) {
			t.Helper()
			w.claimIs("own", func(c *corev1.PersistentVolumeClaim) bool {
				return c.Status.AllocatedResourceStatuses[corev1.ResourceStorage] == state && slices.ContainsFunc(c.Status.Conditions, func(c corev1.PersistentVolumeClaimCondition) bool {
					return c.Type == kind && strings.Contains(c.Message, words)
				})
			})
		}
		says(corev1.PersistentVolumeClaimControllerResizeInfeasible, corev1.PersistentVolumeClaimControllerResizeError, "there is no such disk")
		w.wants("own", "3Gi")
		says(corev1.PersistentVolumeClaimNodeResizePending, corev1.PersistentVolumeClaimFileSystemResizePending, "")
		time.Sleep(10 * time.Minute)
		w.atRest()
		if m := w.drivers.get("own"); m.size != 3<<30 || m.node == "w2" {
			t.Errorf("before a pod has it: %+v", m)
		}
		p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "user"}, Spec: corev1.PodSpec{NodeName: "w2",
			Containers: []corev1.Container{{Name: "c", Image: "i"}}, Volumes: []corev1.Volume{{Name: "v", VolumeSource: corev1.VolumeSource{
				PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: "own"}}}}}}
		w.create(p)
		says(corev1.PersistentVolumeClaimNodeResizePending, corev1.PersistentVolumeClaimNodeResizeError, "not while it is mounted")
		w.drivers.set(func() { w.drivers.onNodes = errGrows })
		w.claimIs("own", has("3Gi"))
		if m := w.drivers.get("own"); m.node != "w2" {
			t.Errorf("it was grown on %s", m.node)
		}
		w.event("FileSystemResizeSuccessful", "volume own has 3Gi, and so has what its node has of it")
	})
}
