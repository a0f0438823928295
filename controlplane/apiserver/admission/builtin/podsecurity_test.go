package builtin_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/apiserver"
	"keelson.dev/keelson/controlplane/apiserver/apiservertest"
	"keelson.dev/keelson/controlplane/apiserver/podsecurity"
)

// newWarnedAdmin returns a client of an administrator and its collected warnings.
func newWarnedAdmin(r *apiservertest.Replica) (kubernetes.Interface, *apiservertest.WarningRecorder) {
	h := &apiservertest.WarningRecorder{}
	conf := r.ClientConfig("admin", api.GroupMasters)
	conf.WarningHandler = h
	c, err := kubernetes.NewForConfig(conf)
	if err != nil {
		r.TB.Fatal(err)
	}
	return c, h
}

// makeRestricted changes a pod so that it meets the restricted standard.
func makeRestricted(p *corev1.Pod) {
	yes, no := true, false
	p.Spec.SecurityContext = &corev1.PodSecurityContext{RunAsNonRoot: &yes,
		SeccompProfile: &corev1.SeccompProfile{Type: corev1.SeccompProfileTypeRuntimeDefault}}
	p.Spec.Containers[0].SecurityContext = &corev1.SecurityContext{
		AllowPrivilegeEscalation: &no, Capabilities: &corev1.Capabilities{Drop: []corev1.Capability{"ALL"}},
	}
}

// F96: a privileged pod in a restricted namespace is rejected with the message of Kubernetes, in
// dry runs too. A pod that meets the standard is accepted.
func TestPodSecurityEnforces(t *testing.T) {
	r := apiservertest.StartReplica(t, nil)
	ctx := apiservertest.Within(t)
	c, warned := newWarnedAdmin(r)
	apiservertest.Labelled(r, "tight", "enforce", "restricted")
	apiservertest.Labelled(r, "base", "enforce", "baseline", "enforce-version", "v1.25")
	_, err := c.CoreV1().Pods("tight").Create(ctx, apiservertest.PodIn("tight", "p", apiservertest.Privileged),
		metav1.CreateOptions{})
	want := `pods "p" is forbidden: violates PodSecurity "restricted:latest": privileged (container "c" must not set ` +
		`securityContext.privileged=true), allowPrivilegeEscalation != false`
	if !apierrors.IsForbidden(err) || !strings.HasPrefix(err.Error(), want) {
		t.Errorf("got %v\nwant %s", err, want)
	}
	if _, err := c.CoreV1().Pods("tight").Create(ctx, apiservertest.PodIn("tight", "p", nil),
		metav1.CreateOptions{DryRun: []string{"All"}}); !apierrors.IsForbidden(err) {
		t.Errorf("a dry run: %v", err)
	}
	if _, err := c.CoreV1().Pods("tight").Create(ctx, apiservertest.PodIn("tight", "p", makeRestricted),
		metav1.CreateOptions{}); err != nil {
		t.Errorf("a modest pod: %v", err)
	}
	if _, err := c.CoreV1().Pods("base").Create(ctx, apiservertest.PodIn("base", "p", nil),
		metav1.CreateOptions{}); err != nil {
		t.Errorf("a plain pod at baseline: %v", err)
	}
	host := func(p *corev1.Pod) { p.Spec.HostNetwork = true }
	if _, err := c.CoreV1().Pods("base").Create(ctx, apiservertest.PodIn("base", "h", host),
		metav1.CreateOptions{}); !apierrors.IsForbidden(err) ||
		!strings.Contains(err.Error(), `violates PodSecurity "baseline:v1.25": host namespaces (hostNetwork=true)`) {
		t.Errorf("the host's network at baseline: %v", err)
	}
	// A pod that is there may be labelled and reported on, whatever the namespace has come to
	// demand, and not changed. Who warns of it looks at those that this replica knows, as it does
	// the newest once it has answered this.
	if _, err := c.CoreV1().Pods("base").Get(ctx, "p", metav1.GetOptions{}); err != nil {
		t.Fatal(err)
	}
	if _, err := c.CoreV1().Namespaces().Patch(ctx, "base", types.MergePatchType,
		[]byte(`{"metadata":{"labels":{"pod-security.kubernetes.io/enforce":"restricted"}}}`),
		metav1.PatchOptions{}); err != nil {
		t.Fatal(err)
	}
	if w := warned.Take(); !strings.Contains(w,
		`existing pods in namespace "base" violate the new PodSecurity enforce level "restricted:v1.25"`) ||
		!strings.Contains(w, "p: allowPrivilegeEscalation != false") {
		t.Errorf("warned %q", w)
	}
	if _, err := c.CoreV1().Pods("base").Patch(ctx, "p", types.MergePatchType,
		[]byte(`{"metadata":{"labels":{"a":"b"}}}`), metav1.PatchOptions{}); err != nil {
		t.Errorf("labelling: %v", err)
	}
	if _, err := c.CoreV1().Pods("base").Patch(ctx, "p", types.MergePatchType, []byte(`{"status":{"phase":"Running"}}`),
		metav1.PatchOptions{}, "status"); err != nil {
		t.Errorf("reporting: %v", err)
	}
	if _, err := c.CoreV1().Pods("base").Patch(ctx, "p", types.StrategicMergePatchType,
		[]byte(`{"spec":{"containers":[{"name":"c","image":"other"}]}}`),
		metav1.PatchOptions{}); !apierrors.IsForbidden(err) {
		t.Errorf("another image: %v", err)
	}
	labels := `{"metadata":{"labels":{"pod-security.kubernetes.io/enforce":"strict"}}}`
	if _, err := c.CoreV1().Namespaces().Patch(ctx, "base", types.MergePatchType, []byte(labels),
		metav1.PatchOptions{}); !apierrors.IsInvalid(err) ||
		!strings.Contains(err.Error(), "must be one of privileged, baseline, restricted") {
		t.Errorf("a level that is none: %v", err)
	}
}

// F96, F128: the standard holds for ephemeral containers, whichever the pod's other containers are.
// A container that meets the standard is accepted.
func TestPodSecurityOfEphemeralContainers(t *testing.T) {
	r := apiservertest.StartReplica(t, nil)
	ctx := apiservertest.Within(t)
	c, _ := newWarnedAdmin(r)
	apiservertest.Labelled(r, "tight", "enforce", "restricted")
	pods := c.CoreV1().Pods("tight")
	if _, err := pods.Create(ctx, apiservertest.PodIn("tight", "p", makeRestricted),
		metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	add := func(container string) error {
		_, err := pods.Patch(ctx, "p", types.StrategicMergePatchType,
			[]byte(`{"spec":{"ephemeralContainers":[`+container+`]}}`), metav1.PatchOptions{}, "ephemeralcontainers")
		return err
	}
	err := add(`{"name":"bold","image":"i","securityContext":{"privileged":true}}`)
	want := `pods "p" is forbidden: violates PodSecurity "restricted:latest": privileged (container "bold" must not ` +
		`set securityContext.privileged=true)`
	if !apierrors.IsForbidden(err) || !strings.HasPrefix(err.Error(), want) {
		t.Errorf("a privileged container: %v\nwant %s", err, want)
	}
	if err := add(`{"name":"plain","image":"i"}`); !apierrors.IsForbidden(err) ||
		!strings.Contains(err.Error(), `allowPrivilegeEscalation != false (container "plain"`) {
		t.Errorf("a container without a security context: %v", err)
	}
	if err := add(`{"name":"modest","image":"i","securityContext":{"allowPrivilegeEscalation":false,` +
		`"capabilities":{"drop":["ALL"]}}}`); err != nil {
		t.Errorf("a modest container: %v", err)
	}
}

// A pod and a workload whose template violates the standard get a warning. Only the pod of the
// workload is rejected.
func TestPodSecurityWarns(t *testing.T) {
	r := apiservertest.StartReplica(t, nil)
	ctx := apiservertest.Within(t)
	c, warned := newWarnedAdmin(r)
	apiservertest.Labelled(r, "loud", "warn", "baseline")
	apiservertest.Labelled(r, "tight", "enforce", "restricted")
	if _, err := c.CoreV1().Pods("loud").Create(ctx, apiservertest.PodIn("loud", "p", apiservertest.Privileged),
		metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	if w := warned.Take(); w != `would violate PodSecurity "baseline:latest": privileged (container "c" must not set `+
		`securityContext.privileged=true)` {
		t.Errorf("warned %q", w)
	}
	pod := apiservertest.PodIn("tight", "p", nil)
	pod.Labels = map[string]string{"a": "b"}
	d := &appsv1.Deployment{ObjectMeta: metav1.ObjectMeta{Name: "d"}, Spec: appsv1.DeploymentSpec{
		Selector: &metav1.LabelSelector{MatchLabels: pod.Labels},
		Template: corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: pod.Labels}, Spec: pod.Spec},
	}}
	if _, err := c.AppsV1().Deployments("tight").Create(ctx, d, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	if w := warned.Take(); !strings.Contains(w,
		`would violate PodSecurity "restricted:latest": allowPrivilegeEscalation != false`) {
		t.Errorf("warned %q", w)
	}
}

// The configuration file sets the defaults of namespaces without labels, and exemptions.
func TestPodSecurityConfiguration(t *testing.T) {
	path := filepath.Join(t.TempDir(), "admission.yaml")
	text := `apiVersion: apiserver.config.k8s.io/v1
kind: AdmissionConfiguration
plugins:
- name: PodSecurity
  configuration:
    apiVersion: pod-security.admission.config.k8s.io/v1
    kind: PodSecurityConfiguration
    defaults: {enforce: baseline, enforce-version: latest}
    exemptions:
      usernames: [operator]
      namespaces: [kube-system]
`
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	conf, err := podsecurity.Load(path)
	if err != nil {
		t.Fatal(err)
	}
	r := apiservertest.StartReplica(t, func(c *apiserver.Config) { c.Admission.PodSecurity = conf })
	r.DefaultAccount("kube-system")
	apiservertest.Labelled(r, "free", "enforce", "privileged")
	ctx := apiservertest.Within(t)
	create := func(c kubernetes.Interface, namespace, name string) error {
		_, err := c.CoreV1().Pods(namespace).Create(ctx, apiservertest.PodIn(namespace, name, apiservertest.Privileged),
			metav1.CreateOptions{})
		return err
	}
	if err := create(r.Admin(), "default", "p"); !apierrors.IsForbidden(err) {
		t.Errorf("by default: %v", err)
	}
	for what, err := range map[string]error{
		"exempt namespace": create(r.Admin(), "kube-system", "p"),
		"exempt user":      create(r.Client("operator", api.GroupMasters), "default", "q"),
		"labelled":         create(r.Admin(), "free", "p"),
	} {
		if err != nil {
			t.Errorf("%s: %v", what, err)
		}
	}
}
