package pod

import (
	"fmt"
	"testing"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/agent/pod/admission"
	"keelson.dev/keelson/internal/virtual"
)

// A node with a Pod Security ceiling runs no pod above it, even if the API has admitted the pod.
// The status reports the reason.
func TestCeiling(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		n := newNode(t)
		n.cfg.Node = func() *v1.Node { return &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: "w1"}} }
		ceiling, err := admission.ParseCeiling("baseline:v1.30")
		if err != nil {
			t.Fatal(err)
		}
		n.cfg.Ceiling = ceiling
		n.startAgent()
		defer func() { n.stop() }()
		yes, no := true, false
		plain, bold := simplePod("u1"), simplePod("u2",
			v1.Container{Name: "app", Image: "hello:1", SecurityContext: &v1.SecurityContext{Privileged: &yes}})
		host, users := simplePod("u3"), simplePod("u4")
		host.Spec.Volumes = []v1.Volume{{Name: "root",
			VolumeSource: v1.VolumeSource{HostPath: &v1.HostPathVolumeSource{Path: "/"}}}}
		users.Spec.HostUsers = &no
		n.cluster.Put(plain, bold, host, users)
		virtual.Wait()
		for uid, want := range map[types.UID]string{
			"u1": "Running||",
			"u2": `Failed|PodSecurity|Pod was rejected: violates PodSecurity "baseline:v1.30", the ` +
				`highest level that ` +
				`this node allows (--pod-security): privileged (container "app" must not set ` +
				`securityContext.privileged=true)`,
			"u3": `Failed|PodSecurity|Pod was rejected: violates PodSecurity "baseline:v1.30", the ` +
				`highest level that ` +
				`this node allows (--pod-security): hostPath volumes (volume "root")`,
			"u4": "Failed|UnsupportedField|Pod was rejected: spec.hostUsers: this node does not support user " +
				"namespaces for pods",
		} {
			st := n.reportedPod(uid).Status
			if got := fmt.Sprintf("%s|%s|%s", st.Phase, st.Reason, st.Message); got != want {
				t.Errorf("%s: %s\nwant %s", uid, got, want)
			}
		}
		if got := n.rt.Count("RunPodSandbox"); got != 1 {
			t.Errorf("%d sandboxes were made", got)
		}
	})
}
