package conformance

import (
	"slices"
	"testing"

	resourcev1 "k8s.io/api/resource/v1"
)

// A claim for administrative access to devices is taken in namespaces that are labelled for it alone, and so are its
// template and an allocation of that kind.
func TestAdminAccess(t *testing.T) {
	of := func(resource string) *kindUnderTest {
		k := shared.kinds.ByResource(resourcev1.SchemeGroupVersion.WithResource(resource))
		u := load(t, shared, k).inNamespace(t, "admin-"+resource)
		u.made.Store(200)
		return u
	}
	claims, templates := of("resourceclaims"), of("resourceclaimtemplates")
	exactly := func(admin any) map[string]any {
		return map[string]any{"devices": map[string]any{"requests": []any{
			map[string]any{"name": "a", "firstAvailable": []any{map[string]any{"name": "b", "deviceClassName": "c"}}},
			map[string]any{"name": "r", "exactly": map[string]any{"deviceClassName": "c", "adminAccess": admin}}}}}
	}
	const why = "Forbidden: admin access to devices requires the `resource.kubernetes.io/admin-access: " +
		"true` label on the containing namespace"
	refused := func(a answer, at string) {
		t.Helper()
		if got := causes(a); a.code != 422 || !slices.Equal(got, []string{at + ": " + why}) {
			t.Errorf("%d %q, want %s", a.code, got, at)
		}
	}
	claim, template := object{"spec": exactly(true)}, object{"spec": map[string]any{"spec": exactly(true)}}
	granted := func(o object) object {
		return merged(o,
			object{"status": map[string]any{"allocation": map[string]any{"devices": map[string]any{"results": []any{
				map[string]any{"request": "a/b", "driver": "example.com", "pool": "p", "device": "d"},
				map[string]any{"request": "r", "driver": "example.com", "pool": "p", "device": "e",
					"adminAccess": true}}}}}})
	}
	refused(claims.send(t, "POST", claims.path(), claims.fresh(t, claim)), "spec.devices.requests[1].adminAccess")
	refused(templates.send(t, "POST", templates.path(), templates.fresh(t, template)),
		"spec.devices.requests[1].adminAccess")
	plain := claims.make(t, object{"spec": exactly(false)})
	refused(claims.send(t, "PUT", claims.path(plain.name(), "status"), granted(plain)),
		"status.allocation.devices.results[1].adminAccess")

	for _, u := range []*kindUnderTest{claims, templates} {
		u.want(t, 200, "PATCH", "/api/v1/namespaces/"+u.ns, labelled("resource.kubernetes.io/admin-access", "true"),
			contentType, mergePatch)
	}
	claims.make(t, claim)
	templates.make(t, template)
	given := claims.want(t, 200, "PUT", claims.path(plain.name(), "status"), granted(plain)).object()
	// What was granted stays when the namespace is no longer labelled.
	claims.want(t, 200, "PATCH", "/api/v1/namespaces/"+claims.ns, labelled("resource.kubernetes.io/admin-access", "no"),
		contentType, mergePatch)
	claims.want(t, 200, "PUT", claims.path(plain.name(), "status"), merged(given, labelled("a", "b")))
}

// A taint of a device gets the time at which it was added, which a replacement without one keeps.
func TestDeviceTaintTimes(t *testing.T) {
	u := load(t, shared, shared.kinds.ByResource(resourcev1.SchemeGroupVersion.WithResource("resourceslices")))
	u.made.Store(300)
	taint := func(key string) map[string]any { return map[string]any{"key": key, "effect": "NoSchedule"} }
	devices := func(taints ...any) object {
		return object{"spec": map[string]any{"devices": []any{map[string]any{"name": "d", "taints": taints}}}}
	}
	added := func(o object, i int) any {
		return value(o, []any{"spec", "devices", 0, "taints", i, "timeAdded"})
	}
	fixed := merged(taint("own"), object{"timeAdded": "2026-01-01T00:00:00Z"})
	o := u.make(t, devices(taint("a"), map[string]any(fixed)))
	if added(o, 0) == nil || added(o, 1) != "2026-01-01T00:00:00Z" {
		t.Errorf("times %v, %v", added(o, 0), added(o, 1))
	}
	again := u.want(t, 200, "PUT", u.path(o.name()), merged(o, devices(taint("a"), taint("own")))).object()
	if again.generation() != o.generation() || added(again, 0) != added(o, 0) || added(again, 1) != added(o, 1) {
		t.Errorf("a replacement: generation %v, times %v, %v", again.generation(), added(again, 0), added(again, 1))
	}
	more := u.want(t, 200, "PUT", u.path(o.name()), merged(again, devices(taint("b"), taint("own")))).object()
	if more.generation() == o.generation() || added(more, 0) == nil || added(more, 1) != added(o, 1) {
		t.Errorf("another taint: generation %v, times %v, %v", more.generation(), added(more, 0), added(more, 1))
	}
}
