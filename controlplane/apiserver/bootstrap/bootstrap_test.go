package bootstrap_test

import (
	"errors"
	"net/netip"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/apiserver/apiservertest"
	"keelson.dev/keelson/controlplane/apiserver/authz"
	"keelson.dev/keelson/controlplane/apiserver/bootstrap"
	"keelson.dev/keelson/controlplane/registry/registrytest"
)

var (
	apiIP  = netip.MustParseAddr("10.96.0.1")
	apiEnd = []netip.AddrPort{netip.MustParseAddrPort("172.30.0.2:6443")}
)

// Whatever is done to Service default/kubernetes and its slice, the next call mends it.
func TestKubernetesServiceIsMended(t *testing.T) {
	r := apiservertest.StartReplica(t, nil)
	ctx := apiservertest.Within(t)
	services, slices := r.Admin().CoreV1().Services("default"), r.Admin().DiscoveryV1().EndpointSlices("default")
	update := func(change func(s *corev1.Service)) func(*corev1.Service, *discoveryv1.EndpointSlice) error {
		return func(s *corev1.Service, _ *discoveryv1.EndpointSlice) error {
			change(s)
			_, err := services.Update(ctx, s, metav1.UpdateOptions{})
			return err
		}
	}
	updateSlice :=
		func(change func(e *discoveryv1.EndpointSlice)) func(*corev1.Service, *discoveryv1.EndpointSlice) error {
			return func(_ *corev1.Service, e *discoveryv1.EndpointSlice) error {
				change(e)
				_, err := slices.Update(ctx, e, metav1.UpdateOptions{})
				return err
			}
		}
	do := func(f func() error) func(*corev1.Service, *discoveryv1.EndpointSlice) error {
		return func(*corev1.Service, *discoveryv1.EndpointSlice) error { return f() }
	}
	harm := map[string]func(svc *corev1.Service, slice *discoveryv1.EndpointSlice) error{
		"the Service is gone": do(func() error {
			return services.Delete(ctx, bootstrap.KubernetesServiceName, metav1.DeleteOptions{})
		}),
		"the slice is gone": do(func() error {
			return slices.Delete(ctx, bootstrap.KubernetesServiceName, metav1.DeleteOptions{})
		}),
		"another port": update(func(s *corev1.Service) { s.Spec.Ports[0].TargetPort = intstr.FromInt32(1) }),
		"a selector":   update(func(s *corev1.Service) { s.Spec.Selector = map[string]string{"a": "b"} }),
		"another type": update(func(s *corev1.Service) { s.Spec.Type = corev1.ServiceTypeNodePort }),
		"the Endpoints are gone": do(func() error {
			return r.Admin().CoreV1().Endpoints("default").Delete(ctx, bootstrap.KubernetesServiceName,
				metav1.DeleteOptions{})
		}),
		"other Endpoints": do(func() error {
			_, err := r.Admin().CoreV1().Endpoints("default").Patch(ctx, bootstrap.KubernetesServiceName,
				types.MergePatchType, []byte(`{"subsets":null}`), metav1.PatchOptions{})
			return err
		}),
		"no endpoints":          updateSlice(func(e *discoveryv1.EndpointSlice) { e.Endpoints = nil }),
		"no label on the slice": updateSlice(func(e *discoveryv1.EndpointSlice) { e.Labels = nil }),
		"another address":       do(func() error { return apiservertest.ReplaceServiceAddress(t, r, "10.96.0.77") }),
		"a Service of no address": do(func() error {
			return apiservertest.ReplaceServiceAddress(t, r, corev1.ClusterIPNone)
		}),
	}
	if err := r.Setup.EnsureKubernetesService(ctx, 0, apiIP, apiEnd); err != nil {
		t.Fatal(err)
	}
	for what, do := range harm {
		t.Run(what, func(t *testing.T) {
			svc, err := services.Get(ctx, bootstrap.KubernetesServiceName, metav1.GetOptions{})
			if err != nil {
				t.Fatal(err)
			}
			slice, err := slices.Get(ctx, bootstrap.KubernetesServiceName, metav1.GetOptions{})
			if err != nil {
				t.Fatal(err)
			}
			if err := do(svc, slice); err != nil {
				t.Fatal(err)
			}
			if err := r.Setup.EnsureKubernetesService(ctx, 0, apiIP, apiEnd); err != nil {
				t.Fatal(err)
			}
			if svc, err = services.Get(ctx, bootstrap.KubernetesServiceName, metav1.GetOptions{}); err != nil ||
				svc.Spec.ClusterIP != apiIP.String() ||
				svc.Spec.Type != corev1.ServiceTypeClusterIP || len(svc.Spec.Ports) != 1 ||
				svc.Spec.Ports[0].TargetPort.IntVal != 6443 ||
				svc.Spec.Selector != nil {
				t.Errorf("%v %+v", err, svc.Spec)
			}
			if slice, err = slices.Get(ctx, bootstrap.KubernetesServiceName, metav1.GetOptions{}); err != nil ||
				len(slice.Endpoints) != 1 ||
				slice.Labels[discoveryv1.LabelServiceName] != bootstrap.KubernetesServiceName {
				t.Errorf("%v %+v", err, slice)
			}
			old, err := r.Admin().CoreV1().Endpoints("default").Get(ctx, bootstrap.KubernetesServiceName,
				metav1.GetOptions{})
			if err != nil || len(old.Subsets) != 1 || len(old.Subsets[0].Addresses) != 1 ||
				old.Subsets[0].Addresses[0].IP != apiEnd[0].Addr().String() ||
				old.Subsets[0].Ports[0].Port != 6443 || old.Labels[discoveryv1.LabelSkipMirror] != "true" {
				t.Errorf("%v %+v", err, old)
			}
		})
	}
}

// The address of the API is refused to other Services. Where one has it all the same, from before,
// the error says which, the endpoints are kept, and nothing that has a Service of the API is taken
// away for it.
func TestAddressOfTheAPI(t *testing.T) {
	r := apiservertest.StartReplica(t, nil)
	ctx := apiservertest.Within(t)
	services := r.Admin().CoreV1().Services("default")
	thief := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "thief"},
		Spec: corev1.ServiceSpec{ClusterIP: apiIP.String(),
			Ports: []corev1.ServicePort{{Port: 1, Protocol: corev1.ProtocolTCP}}}}
	if _, err := services.Create(ctx, thief, metav1.CreateOptions{}); !apierrors.IsInvalid(err) ||
		!strings.Contains(err.Error(), `spec.clusterIPs[0]: Invalid value: "10.96.0.1": is reserved for Service `+
			`default/kubernetes`) {
		t.Fatalf("the address of the API was given away: %v", err)
	}
	thief.Spec.ClusterIPs = []string{apiIP.String()}
	kind := r.Kinds.ByType(thief)
	if _, err := registrytest.NewBackend(r.Registry).Do(ctx,
		&api.Request{User: api.APIServerUser(), Verb: api.VerbCreate, Kind: kind, Namespace: "default", Name: "thief",
			Object: thief}); err != nil {
		t.Fatal(err)
	}
	for _, already := range []bool{false, true} {
		if already {
			if _, err := services.Create(ctx,
				&corev1.Service{ObjectMeta: metav1.ObjectMeta{Name: bootstrap.KubernetesServiceName},
					Spec: corev1.ServiceSpec{ClusterIP: "10.96.0.78", Ports: []corev1.ServicePort{{Port: 443}}}},
				metav1.CreateOptions{}); err != nil {
				t.Fatal(err)
			}
		}
		err := r.Setup.EnsureKubernetesService(ctx, 0, apiIP, apiEnd)
		if !errors.Is(err, bootstrap.ErrAddressTaken) ||
			!strings.Contains(err.Error(), "Service default/thief has 10.96.0.1") {
			t.Errorf("the error does not tell who has the address: %v", err)
		}
		if slice, err := r.Admin().DiscoveryV1().EndpointSlices("default").Get(ctx, bootstrap.KubernetesServiceName,
			metav1.GetOptions{}); err != nil || len(slice.Endpoints) != 1 {
			t.Errorf("the endpoints were not written: %v", err)
		}
		if _, err := services.Get(ctx, bootstrap.KubernetesServiceName, metav1.GetOptions{}); already && err != nil {
			t.Errorf("the Service that there was: %v", err)
		}
	}
	// Who has it may still be changed in other respects, and the address comes back when it goes.
	held, err := services.Get(ctx, "thief", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	held.Labels = map[string]string{"a": "b"}
	if _, err := services.Update(ctx, held, metav1.UpdateOptions{}); err != nil {
		t.Errorf("a label for who has the address: %v", err)
	}
	if err := services.Delete(ctx, "thief", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	if err := r.Setup.EnsureKubernetesService(ctx, 0, apiIP, apiEnd); err != nil {
		t.Fatal(err)
	}
	if svc, err := services.Get(ctx, bootstrap.KubernetesServiceName, metav1.GetOptions{}); err != nil ||
		svc.Spec.ClusterIP != apiIP.String() {
		t.Errorf("%v %+v", err, svc)
	}
}

// A leader of the past writes none of this.
func TestBootstrapIsFenced(t *testing.T) {
	r := apiservertest.StartReplica(t, nil)
	ctx := apiservertest.Within(t)
	const never = 1 << 60
	if err := r.Setup.EnsureKubernetesService(ctx, never, apiIP, apiEnd); err == nil {
		t.Error("Service default/kubernetes was written under a term that is not")
	}
	if err := r.Admin().RbacV1().ClusterRoles().Delete(ctx, "view", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	if err := r.Setup.EnsureBootstrap(ctx, never); err == nil {
		t.Error("a default role was written under a term that is not")
	}
	if _, err := r.Admin().RbacV1().ClusterRoles().Get(ctx, "view", metav1.GetOptions{}); !apierrors.IsNotFound(err) {
		t.Errorf("role view: %v", err)
	}
}

// Default roles and bindings are completed, and nothing that an administrator added is taken away.
func TestDefaultRolesAreReconciled(t *testing.T) {
	r := apiservertest.StartReplica(t, nil)
	ctx := apiservertest.Within(t)
	roles, bindings := r.Admin().RbacV1().ClusterRoles(), r.Admin().RbacV1().ClusterRoleBindings()
	change := func(name string, f func(c *rbacv1.ClusterRole)) {
		t.Helper()
		c, err := roles.Get(ctx, name, metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		f(c)
		if _, err := roles.Update(ctx, c, metav1.UpdateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	own := rbacv1.PolicyRule{Verbs: []string{"get"}, APIGroups: []string{"example.com"}, Resources: []string{"things"}}
	change("system:aggregate-to-edit", func(c *rbacv1.ClusterRole) { c.Rules = append(c.Rules[1:], own) })
	change("view", func(c *rbacv1.ClusterRole) {
		c.Rules, c.Annotations = []rbacv1.PolicyRule{own}, map[string]string{bootstrap.AutoUpdateAnnotation: "false"}
	})
	if err := roles.Delete(ctx, "admin", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	b, err := bindings.Get(ctx, "system:basic-user", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	b.Subjects = []rbacv1.Subject{apiservertest.UserSubject("alice")}
	if _, err := bindings.Update(ctx, b, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	d, err := bindings.Get(ctx, "system:discovery", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if err := bindings.Delete(ctx, d.Name, metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	d.RoleRef.Name, d.ResourceVersion, d.UID = "view", "", ""
	if _, err := bindings.Create(ctx, d, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}

	if err := r.Setup.EnsureBootstrap(ctx, 0); err != nil {
		t.Fatal(err)
	}
	has := func(name string, want rbacv1.PolicyRule) bool {
		c, err := roles.Get(ctx, name, metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		for _, rule := range c.Rules {
			if strings.Join(rule.Resources, " ") == strings.Join(want.Resources, " ") {
				return true
			}
		}
		return false
	}
	if !has("system:aggregate-to-edit", own) || !has("view", own) {
		t.Error("a rule of the administrator's is gone")
	}
	if c, err := roles.Get(ctx, "view", metav1.GetOptions{}); err != nil || len(c.Rules) != 1 {
		t.Errorf("a role that is not to be updated was: %v %v", err, c.Rules)
	}
	exec := false
	c, err := roles.Get(ctx, "system:aggregate-to-edit", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for _, rule := range c.Rules {
		exec = exec || strings.Contains(strings.Join(rule.Resources, " "), "pods/exec") &&
			strings.Contains(strings.Join(rule.Verbs, " "), "get")
	}
	if !exec {
		t.Errorf("the missing rule of role system:aggregate-to-edit is not back: %v", c.Rules)
	}
	if _, err := roles.Get(ctx, "admin", metav1.GetOptions{}); err != nil {
		t.Errorf("the deleted role: %v", err)
	}
	if b, err = bindings.Get(ctx, b.Name, metav1.GetOptions{}); err != nil || len(b.Subjects) != 2 ||
		b.Subjects[0].Name != "alice" || b.Subjects[1].Name != api.GroupAuthenticated {
		t.Errorf("%v %+v", err, b.Subjects)
	}
	if d, err = bindings.Get(ctx, d.Name, metav1.GetOptions{}); err != nil || d.RoleRef.Name != "system:discovery" {
		t.Errorf("%v %+v", err, d.RoleRef)
	}
	before := r.Store.Applied()
	if err := r.Setup.EnsureBootstrap(ctx, 0); err != nil || r.Store.Applied() != before {
		t.Errorf("%v: a second time wrote revision %d after %d", err, r.Store.Applied(), before)
	}
}

// The namespaces' roles are made of others. Where they were not, what somebody added stays, in the
// role that they are made of; the controllers may write what they do not hold into them, and nobody
// else may.
func TestNamespaceRolesAreAggregated(t *testing.T) {
	r := apiservertest.StartReplica(t, nil)
	ctx := apiservertest.Within(t)
	roles := r.Admin().RbacV1().ClusterRoles()
	own := rbacv1.PolicyRule{Verbs: []string{"get"}, APIGroups: []string{"example.com"}, Resources: []string{"things"}}
	before, err := roles.Get(ctx, "edit", metav1.GetOptions{})
	if err != nil || before.AggregationRule == nil ||
		before.Labels["rbac.authorization.k8s.io/aggregate-to-admin"] != "true" || len(before.Rules) == 0 {
		t.Fatalf("%+v, %v", before, err)
	}
	before.AggregationRule, before.Labels, before.Rules = nil, nil, append(before.Rules, own) // as it was once
	if _, err := roles.Update(ctx, before, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	if err := roles.Delete(ctx, "system:aggregate-to-edit", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := r.Setup.EnsureBootstrap(ctx, 0); err != nil {
			t.Fatal(err)
		}
	}
	part, err := roles.Get(ctx, "system:aggregate-to-edit", metav1.GetOptions{})
	if err != nil || part.Labels["rbac.authorization.k8s.io/aggregate-to-edit"] != "true" ||
		!slices.ContainsFunc(part.Rules, func(p rbacv1.PolicyRule) bool {
			return slices.Equal(p.Resources, own.Resources)
		}) {
		t.Errorf("%+v, %v", part, err)
	}
	after, err := roles.Get(ctx, "edit", metav1.GetOptions{})
	if err != nil || after.AggregationRule == nil || len(after.AggregationRule.ClusterRoleSelectors) != 1 {
		t.Fatalf("%+v, %v", after, err)
	}
	after.Rules = []rbacv1.PolicyRule{own}
	if _, err := r.Client(api.UserController).RbacV1().ClusterRoles().Update(ctx, after, metav1.UpdateOptions{}); err !=
		nil {
		t.Errorf("the controllers: %v", err)
	}
}

// A default role of an earlier release and its binding go, so that nobody keeps its rights, unless
// an administrator keeps them or has made them.
func TestRetiredDefaultsGo(t *testing.T) {
	r := apiservertest.StartReplica(t, nil)
	ctx := apiservertest.Within(t)
	roles, bindings := r.Admin().RbacV1().ClusterRoles(), r.Admin().RbacV1().ClusterRoleBindings()
	for _, c := range []struct {
		label, update string
		stays         bool
	}{{"rbac-defaults", "true", false}, {"rbac-defaults", "false", true}, {"", "", true}} {
		meta := metav1.ObjectMeta{Name: authz.Retired[0],
			Labels:      map[string]string{bootstrap.BootstrappingLabel: c.label},
			Annotations: map[string]string{bootstrap.AutoUpdateAnnotation: c.update}}
		if c.label == "" {
			meta.Labels, meta.Annotations = nil, nil
		}
		if _, err := roles.Create(ctx, &rbacv1.ClusterRole{ObjectMeta: meta}, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		if _, err := bindings.Create(ctx, &rbacv1.ClusterRoleBinding{ObjectMeta: meta, RoleRef: rbacv1.RoleRef{
			APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: meta.Name}}, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		if err := r.Setup.EnsureBootstrap(ctx, 0); err != nil {
			t.Fatal(err)
		}
		_, role := roles.Get(ctx, meta.Name, metav1.GetOptions{})
		_, binding := bindings.Get(ctx, meta.Name, metav1.GetOptions{})
		if (role == nil) != c.stays || (binding == nil) != c.stays {
			t.Errorf("with label %q and auto-update %q: role %v, binding %v", c.label, c.update, role, binding)
		}
		if c.stays {
			if err := errors.Join(roles.Delete(ctx, meta.Name, metav1.DeleteOptions{}),
				bindings.Delete(ctx, meta.Name, metav1.DeleteOptions{})); err != nil {
				t.Fatal(err)
			}
		}
	}
}
