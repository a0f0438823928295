package pod

import (
	"fmt"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/internal/virtual"
)

// A node with a Pod Security ceiling runs no pod above it, even if the API has admitted the pod.
// The status reports the reason.
func TestCeiling(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		n := newNode(t)
		n.cfg.Node = func() *v1.Node { return &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: "w1"}} }
		ceiling, err := ParseCeiling("baseline:v1.30")
		if err != nil {
			t.Fatal(err)
		}
		n.cfg.Ceiling = ceiling
		n.start()
		defer func() { n.stop() }()
		yes, no := true, false
		plain, bold := simplePod("u1"), simplePod("u2", v1.Container{Name: "app", Image: "hello:1", SecurityContext: &v1.SecurityContext{Privileged: &yes}})
		host, users := simplePod("u3"), simplePod("u4")
		host.Spec.Volumes = []v1.Volume{{Name: "root", VolumeSource: v1.VolumeSource{HostPath: &v1.HostPathVolumeSource{Path: "/"}}}}
		users.Spec.HostUsers = &no
		n.cluster.Put(plain, bold, host, users)
		virtual.Wait()
		for uid, want := range map[types.UID]string{
			"u1": "Running||",
			"u2": `Failed|PodSecurity|Pod was rejected: violates PodSecurity "baseline:v1.30", the most that this node allows (--pod-security): privileged (container "app" must not set securityContext.privileged=true)`,
			"u3": `Failed|PodSecurity|Pod was rejected: violates PodSecurity "baseline:v1.30", the most that this node allows (--pod-security): hostPath volumes (volume "root")`,
			"u4": "Failed|UnsupportedField|Pod was rejected: spec.hostUsers: this node gives pods no user namespace of their own",
		} {
			st := n.pod(uid).Status
			if got := fmt.Sprintf("%s|%s|%s", st.Phase, st.Reason, st.Message); got != want {
				t.Errorf("%s: %s\nwant %s", uid, got, want)
			}
		}
		if got := n.rt.Count("RunPodSandbox"); got != 1 {
			t.Errorf("%d sandboxes were made", got)
		}
	})
}

func TestParseCeiling(t *testing.T) {
	for text, want := range map[string]string{"privileged": "<nil>", "baseline": "baseline:latest", "restricted:v1.25": "restricted:v1.25"} {
		c, err := ParseCeiling(text)
		got := "<nil>"
		if c != nil {
			got = c.level.String()
		}
		if err != nil || got != want {
			t.Errorf("%s: %s, %v", text, got, err)
		}
	}
	for text, words := range map[string]string{"": "must be one of", "strict": `level "strict"`, "baseline:2": `version "2"`} {
		if _, err := ParseCeiling(text); err == nil || !strings.Contains(err.Error(), words) {
			t.Errorf("%q: %v", text, err)
		}
	}
}

// An agent rejects a pod with a field that it does not support, and names the field.
func TestIncapable(t *testing.T) {
	no := false
	for want, spec := range map[string]v1.PodSpec{
		"spec.hostUsers": {HostUsers: &no},
		"spec.containers[0].env[0].valueFrom.fileKeyRef": {Containers: []v1.Container{{Env: []v1.EnvVar{
			{ValueFrom: &v1.EnvVarSource{FileKeyRef: &v1.FileKeySelector{}}}}}}},
		"spec.volumes[0].projected.sources[0].clusterTrustBundle": {Volumes: []v1.Volume{{VolumeSource: v1.VolumeSource{
			Projected: &v1.ProjectedVolumeSource{Sources: []v1.VolumeProjection{{ClusterTrustBundle: &v1.ClusterTrustBundleProjection{}}}}}}}},
	} {
		got := Incapable(&v1.Pod{Spec: spec})
		if got == nil || !strings.HasPrefix(got.Message, fmt.Sprintf("Pod was rejected: %s: this node ", want)) {
			t.Errorf("%s: %+v", want, got)
		}
	}
	if got := Incapable(simplePod("u1")); got != nil {
		t.Errorf("a plain pod: %+v", got)
	}
}

// A pod for another operating system is rejected with kubelet's reason and message.
func TestPodOfAnotherSystemIsRejected(t *testing.T) {
	field, label, both := simplePod("u1"), simplePod("u2"), simplePod("u3")
	windows := &v1.PodOS{Name: v1.Windows}
	no := false
	field.Spec.OS, field.Spec.HostUsers = windows, &no
	label.Labels = map[string]string{v1.LabelOSStable: "windows"}
	both.Spec.OS, both.Labels = windows, label.Labels
	const (
		byField = "Pod was rejected: Failed to admit pod as the OS field doesn't match node OS"
		byLabel = "Pod was rejected: Failed to admit pod as the `kubernetes.io/os` label doesn't match node label"
	)
	for _, c := range []struct {
		name, reason, message string
		pod                   *v1.Pod
	}{{"field", "PodOSNotSupported", byField, field}, {"label", "PodOSSelectorNodeLabelDoesNotMatch", byLabel, label},
		{"field and label", "PodOSSelectorNodeLabelDoesNotMatch", byLabel, both}} {
		if got := Incapable(c.pod); got == nil || got.Reason != c.reason || got.Message != c.message || !got.Refused {
			t.Errorf("%s: %+v, want %s %q", c.name, got, c.reason, c.message)
		}
	}
	linux := simplePod("u4")
	linux.Spec.OS, linux.Labels = &v1.PodOS{Name: v1.Linux}, map[string]string{v1.LabelOSStable: "linux"}
	if got := Incapable(linux); got != nil {
		t.Errorf("a pod for linux: %+v", got)
	}
}
