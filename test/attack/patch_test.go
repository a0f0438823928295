package attack

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	authv1 "k8s.io/api/authentication/v1"
	v1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"keelson.dev/keelson/test/testenv"
)

// createTenant returns a new namespace and the configuration of a user with all rights in it and no
// other rights.
func createTenant(t *testing.T) (ns string, config *rest.Config) {
	t.Helper()
	cs, ctx := testenv.Client(t), context.Background()
	ns = testenv.Namespace(t)
	sa := &v1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: "tenant"}}
	if _, err := cs.CoreV1().ServiceAccounts(ns).Create(ctx, sa, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	bind := &rbacv1.RoleBinding{ObjectMeta: metav1.ObjectMeta{Name: "tenant"},
		Subjects: []rbacv1.Subject{{Kind: "ServiceAccount", Name: "tenant", Namespace: ns}},
		RoleRef:  rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "cluster-admin"}}
	if _, err := cs.RbacV1().RoleBindings(ns).Create(ctx, bind, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	token, err := cs.CoreV1().ServiceAccounts(ns).CreateToken(ctx, "tenant", &authv1.TokenRequest{},
		metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	admin := testenv.RestConfig(t)
	config = &rest.Config{Host: admin.Host, BearerToken: token.Status.Token, QPS: -1,
		TLSClientConfig: rest.TLSClientConfig{CAData: admin.CAData, CAFile: admin.CAFile, ServerName: admin.ServerName}}
	testenv.Eventually(t, soon, func() error { // until the replica knows of the rights
		own, err := kubernetes.NewForConfig(config)
		if err == nil {
			_, err = own.CoreV1().ConfigMaps(ns).List(ctx, metav1.ListOptions{Limit: 1})
		}
		return err
	})
	return ns, config
}

func newClient(t *testing.T, config *rest.Config) *kubernetes.Clientset {
	t.Helper()
	cs, err := kubernetes.NewForConfig(config)
	if err != nil {
		t.Fatal(err)
	}
	return cs
}

func maxPeakMemory(t *testing.T) int64 {
	t.Helper()
	var most int64
	for i := 1; i <= replicas; i++ {
		most = max(most, peakMemory(t, fmt.Sprintf("cp%d", i)))
	}
	return most
}

func clearPeaks(t *testing.T) {
	t.Helper()
	for i := 1; i <= replicas; i++ {
		clearPeak(t, fmt.Sprintf("cp%d", i))
	}
}

// A few kilobytes of patch cost the attacker nothing. They must cost a replica no
// more than the patch of any other object.
func TestPatchesThatGrow(t *testing.T) {
	guardCluster(t)
	ns, config := createTenant(t)
	cs, ctx := newClient(t, config), context.Background()
	text := strings.Repeat("x", 200<<10)
	if _, err := cs.CoreV1().ConfigMaps(ns).Create(ctx,
		&v1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "a"}, Data: map[string]string{"k": text}},
		metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	doubling := make([]string, 40)
	for i := range doubling {
		doubling[i] = fmt.Sprintf(`{"op":"copy","from":"/data","path":"/data/x%d"}`, i)
	}
	clearPeaks(t)
	before := maxPeakMemory(t)
	for name, c := range map[string]struct {
		kind types.PatchType
		body string
	}{
		"copies that double": {types.JSONPatchType, "[" + strings.Join(doubling, ",") + "]"},
		"objects of nothing": {types.MergePatchType,
			`{"metadata":{"ownerReferences":[` + strings.TrimSuffix(strings.Repeat("{},", 1<<19), ",") + `]}}`},
		"aliases": {types.ApplyPatchType, "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: a}\nx: &a " + text +
			"\ndata: {k: [" +
			strings.TrimSuffix(strings.Repeat("*a,", 5000), ",") + "]}\n"},
		"lists in lists": {types.StrategicMergePatchType,
			`{"data":` + strings.Repeat("[", 1<<20) + strings.Repeat("]", 1<<20) + "}"},
	} {
		began := time.Now()
		_, err := cs.CoreV1().ConfigMaps(ns).Patch(ctx, "a", c.kind, []byte(c.body),
			metav1.PatchOptions{FieldManager: "attack"})
		if !apierrors.IsRequestEntityTooLargeError(err) {
			t.Errorf("%s: %v", name, err)
		}
		t.Logf("%s: refused after %v", name, time.Since(began))
	}
	if grown := maxPeakMemory(t) - before; grown > 200*megabyte {
		t.Errorf("the replicas grew by %d MiB", grown/megabyte)
	}
}
