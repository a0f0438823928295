package attack

import (
	"context"
	"fmt"
	"strings"
	"testing"

	authenticationv1 "k8s.io/api/authentication/v1"
	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/test/testenv"
)

// runOnHost runs a shell command on a host and returns its output.
func runOnHost(t *testing.T, host, line string) []byte {
	t.Helper()
	out, err := testenv.Host(t, host).Command(context.Background(), "sh", "-c", line).Output()
	if err != nil {
		t.Fatalf("%s: %s: %v", host, line, err)
	}
	return out
}

// stolenNodeConfig returns a client configuration made of the credentials on a worker's disk.
func stolenNodeConfig(t *testing.T, worker string) *rest.Config {
	t.Helper()
	stolen := runOnHost(t, worker, `cat "$(find /var/lib/keelson -name node.pem | head -1)"`)
	conf := testenv.RestConfig(t)
	conf.CertFile, conf.KeyFile, conf.CertData, conf.KeyData = "", "", stolen, stolen
	return conf
}

// nodeClient returns a client with the configuration of stolenNodeConfig.
func nodeClient(t *testing.T, worker string) kubernetes.Interface {
	t.Helper()
	cs, err := kubernetes.NewForConfig(stolenNodeConfig(t, worker))
	if err != nil {
		t.Fatal(err)
	}
	return cs
}

// A thief of a node's key cannot read a Secret through an invented pod that names it in any field,
// gets no token for an account without a pod on the node, and cannot impersonate others. The
// attempts are in the audit log of the replica that refused them.
func TestStolenNodeKey(t *testing.T) {
	admin := guardCluster(t)
	ns, ctx := testenv.Namespace(t), context.Background()
	_, err := admin.CoreV1().Secrets(ns).Create(ctx,
		&v1.Secret{ObjectMeta: metav1.ObjectMeta{Name: "crown"}, StringData: map[string]string{"k": "jewels"}},
		metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	thief := nodeClient(t, "w1")
	crown := v1.LocalObjectReference{Name: "crown"}
	for what, spec := range map[string]v1.PodSpec{
		"env": {
			Containers: []v1.Container{{Env: []v1.EnvVar{{Name: "E",
				ValueFrom: &v1.EnvVarSource{SecretKeyRef: &v1.SecretKeySelector{LocalObjectReference: crown,
					Key: "k"}}}}}}},
		"envFrom": {Containers: []v1.Container{{
			EnvFrom: []v1.EnvFromSource{{SecretRef: &v1.SecretEnvSource{LocalObjectReference: crown}}}}}},
		"pull": {Containers: []v1.Container{{}}, ImagePullSecrets: []v1.LocalObjectReference{crown}},
		"volume": {Containers: []v1.Container{{}},
			Volumes: []v1.Volume{{Name: "v",
				VolumeSource: v1.VolumeSource{Secret: &v1.SecretVolumeSource{SecretName: "crown"}}}}},
		"projected": {Containers: []v1.Container{{}},
			Volumes: []v1.Volume{{Name: "v", VolumeSource: v1.VolumeSource{Projected: &v1.ProjectedVolumeSource{
				Sources: []v1.VolumeProjection{{Secret: &v1.SecretProjection{LocalObjectReference: crown}}}}}}}},
		"csi": {Containers: []v1.Container{{}},
			Volumes: []v1.Volume{{Name: "v",
				VolumeSource: v1.VolumeSource{CSI: &v1.CSIVolumeSource{Driver: "d", NodePublishSecretRef: &crown}}}}},
		"account": {Containers: []v1.Container{{}}, ServiceAccountName: "default"},
	} {
		spec.NodeName = "w1"
		spec.Containers[0].Name, spec.Containers[0].Image = "c", "i"
		_, err := thief.CoreV1().Pods(ns).Create(ctx, &v1.Pod{
			ObjectMeta: metav1.ObjectMeta{Name: "mirror-" + strings.ToLower(what),
				Annotations: map[string]string{v1.MirrorPodAnnotationKey: "x"}}, Spec: spec,
		}, metav1.CreateOptions{})
		if !apierrors.IsForbidden(err) && !apierrors.IsInvalid(err) {
			t.Errorf("a mirror pod that names the secret by %s: %v", what, err)
		}
	}
	if _, err := thief.CoreV1().Secrets(ns).Get(ctx, "crown", metav1.GetOptions{}); !apierrors.IsForbidden(err) {
		t.Errorf("the secret: %v", err)
	}
	_, err = thief.CoreV1().ServiceAccounts(ns).CreateToken(ctx, "default",
		&authenticationv1.TokenRequest{Spec: authenticationv1.TokenRequestSpec{
			BoundObjectRef: &authenticationv1.BoundObjectReference{APIVersion: "v1", Kind: "Pod", Name: "none",
				UID: types.UID("x")},
		}}, metav1.CreateOptions{})
	if err == nil {
		t.Error("a token for a pod that there is not")
	}
	conf := testenv.RestConfig(t)
	conf.Impersonate.UserName = api.UserAPIServer
	borrowed, err := kubernetes.NewForConfig(conf)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := borrowed.CoreV1().Secrets(ns).List(ctx, metav1.ListOptions{}); !apierrors.IsForbidden(err) {
		t.Errorf("the apiserver's name without its group: %v", err)
	}
	testenv.Eventually(t, soon, func() error {
		logs := ""
		for _, replica := range []string{"cp1", "cp2", "cp3"} {
			logs += string(runOnHost(t, replica, "cat /var/lib/keelson/controlplane/audit/*.log | grep "+ns+" || true"))
		}
		for _, want := range []string{`"username":"system:node:w1"`, "crown",
			`"impersonatedUser":{"username":"system:apiserver"`} {
			if !strings.Contains(logs, want) {
				return fmt.Errorf("the audit logs have no %s", want)
			}
		}
		if strings.Contains(logs, "jewels") {
			t.Error("the secret stands in the audit log")
		}
		return nil
	})
}
