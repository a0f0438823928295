package clients

import (
	"context"
	"encoding/base64"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/test/testenv"
)

// shopOperator is the operator of this folder, running as two pods.
type shopOperator struct {
	*testing.T
	ns string
}

func (o shopOperator) runKctl(args ...string) string {
	o.Helper()
	return testenv.Kctl(o, append([]string{"-n", o.ns}, args...)...)
}

func (o shopOperator) tryKctl(args ...string) (string, error) {
	o.Helper()
	return testenv.Try(o, filepath.Join(testenv.Lab().Config.BinDir, "kctl"), append([]string{"-n", o.ns}, args...)...)
}

// applyManifest applies a manifest, with TESTS_OWN replaced by the test's namespace, and returns
// the output.
func (o shopOperator) applyManifest(manifest string) (string, error) {
	o.Helper()
	file := filepath.Join(o.TempDir(), "m.yaml")
	if err := os.WriteFile(file, []byte(strings.ReplaceAll(manifest, "TESTS_OWN", o.ns)), 0o600); err != nil {
		o.Fatal(err)
	}
	return o.tryKctl("apply", "-f", file)
}

func (o shopOperator) shopField(path string) string {
	o.Helper()
	return o.runKctl("get", "shop", "corner", "-o", "jsonpath={"+path+"}")
}

// installOperator installs the operator with a certificate for its Service.
func (o shopOperator) installOperator() {
	o.Helper()
	testenv.LoadImage(o, "example.com/operator:v1", map[string]string{"operator": clientProgram(o.T, "operator")},
		"/operator")
	cert, key := testCertificate(o.T, fmt.Sprintf("operator.%s.svc", o.ns))
	secret := &v1.Secret{ObjectMeta: metav1.ObjectMeta{Name: "operator-certs"}, Type: v1.SecretTypeTLS,
		Data: map[string][]byte{v1.TLSCertKey: cert, v1.TLSPrivateKeyKey: key}}
	if _, err := testenv.Client(o).CoreV1().Secrets(o.ns).Create(context.Background(), secret,
		metav1.CreateOptions{}); err != nil {
		o.Fatal(err)
	}
	manifest, err := os.ReadFile("testdata/operator.yaml")
	if err != nil {
		o.Fatal(err)
	}
	text := strings.ReplaceAll(string(manifest), "caBundle: CA", "caBundle: "+base64.StdEncoding.EncodeToString(cert))
	if out, err := o.applyManifest(text); err != nil {
		o.Fatalf("%v\n%s", err, out)
	}
	o.Cleanup(func() {
		testenv.Kctl(o, "delete", "mutatingwebhookconfigurations,validatingwebhookconfigurations", "shops.example.com")
		testenv.Kctl(o, "delete", "crd", "shops.example.com")
	})
	o.runKctl("rollout", "status", "deployment/operator", "--timeout=180s")
	awaitEndpoints(o, o.ns, "operator", 2)
}

// F15 F35: an operator made with controller-runtime, running as two pods behind a Service: its webhooks default and judge
// by way of the agents' tunnel, two versions are one object by its conversion webhook, its finalizer holds up a deletion
// until it has done its work, and when the leader is killed the other one takes over.
func TestOperator(t *testing.T) {
	o := shopOperator{t, testenv.Namespace(t)}
	o.installOperator()
	const corner = "apiVersion: example.com/v1\nkind: Shop\nmetadata: {name: corner}\nspec: {replicas: 2}\n"
	if out, err := o.applyManifest(corner); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	if got := o.shopField(".spec.greeting"); got != "hello from corner" {
		t.Errorf("the defaulting webhook left greeting %q", got)
	}
	testenv.Eventually(t, soon, func() error {
		if got := o.shopField(".status.readyReplicas"); got != "2" {
			return fmt.Errorf("%s replicas are ready", got)
		}
		return nil
	})
	o.requireRefused("a shop has at most 3, not 4", "patch", "shop", "corner", "--type=merge", "-p",
		`{"spec":{"replicas":4}}`)
	o.requireRefused("is immutable", "patch", "shop", "corner", "--type=merge", "-p", `{"spec":{"greeting":"other"}}`)
	o.runKctl("annotate", "shop", "corner", "example.com/keep=yes")
	o.requireRefused("keeps the shop", "delete", "shop", "corner")
	o.runKctl("annotate", "shop", "corner", "example.com/keep-")
	o.checkVersions()
	o.checkWarning()
	o.checkFailover()
	o.runKctl("delete", "shop", "corner", "--timeout=180s")
	ctx, cs := context.Background(), testenv.Client(t)
	if _, err := cs.CoreV1().ConfigMaps(o.ns).Get(ctx, "corner-receipt", metav1.GetOptions{}); err != nil {
		t.Errorf("the shop is gone and there is no receipt: %v", err)
	}
	testenv.Eventually(t, soon, func() error {
		if _, err := cs.AppsV1().Deployments(o.ns).Get(ctx, "corner", metav1.GetOptions{}); !apierrors.IsNotFound(err) {
			return fmt.Errorf("the Deployment of the shop that is gone: %v", err)
		}
		return nil
	})
}

func (o shopOperator) requireRefused(why string, args ...string) {
	o.Helper()
	if out, err := o.tryKctl(args...); err == nil || !strings.Contains(out, "denied the request") ||
		!strings.Contains(out, why) {
		o.Errorf("kctl %s: %v, want a denial by %q\n%s", strings.Join(args, " "), err, why, out)
	}
}

// checkVersions reads and writes the object in both versions.
func (o shopOperator) checkVersions() {
	o.Helper()
	if got := o.runKctl("get", "shops.v1beta1.example.com", "corner", "-o",
		"jsonpath={.spec.size} {.spec.replicas}"); got != "2 " {
		o.Errorf("in the older version the object is %q", got)
	}
	o.runKctl("patch", "shops.v1beta1.example.com", "corner", "--type=merge", "-p", `{"spec":{"size":1}}`)
	if got := o.shopField(".spec.replicas"); got != "1" {
		o.Errorf("written in the older version, the object in the newer version is %q", got)
	}
	// The webhooks ask for v1 only: matchPolicy Equivalent has them called for v1beta1 as well.
	o.requireRefused("a shop has at most 3", "patch", "shops.v1beta1.example.com", "corner", "--type=merge", "-p",
		`{"spec":{"size":9}}`)
}

func (o shopOperator) checkWarning() {
	o.Helper()
	out, err := o.applyManifest("apiVersion: example.com/v1\nkind: Shop\nmetadata: {name: shut}\nspec: {replicas: 0}\n")
	if err != nil || !strings.Contains(out, "Warning: a shop without replicas is closed") {
		o.Errorf("%v, the webhook's warning is not in\n%s", err, out)
	}
	o.runKctl("delete", "shop", "shut", "--timeout=180s")
}

// checkFailover deletes the leading pod and checks that the other pod continues.
func (o shopOperator) checkFailover() {
	o.Helper()
	leader := o.shopField(".status.leader")
	o.runKctl("delete", "pod", leader, "--grace-period=0", "--force")
	testenv.Eventually(o, soon, func() error { // webhooks are still asked of the pod that is gone, for a moment
		out, err := o.tryKctl("scale", "shop", "corner", "--replicas=3")
		if err != nil {
			return fmt.Errorf("%w: %s", err, out)
		}
		return nil
	})
	testenv.Eventually(o, soon, func() error {
		if ready, now := o.shopField(".status.readyReplicas"), o.shopField(".status.leader"); ready != "3" ||
			now == leader {
			return fmt.Errorf("%s ready replicas by %s, it was %s", ready, now, leader)
		}
		return nil
	})
}
