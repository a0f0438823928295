package builtin

import (
	"context"
	"fmt"
	"time"

	resourcev1 "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/kinds/resource"
	"keelson.dev/keelson/controlplane/apiserver/admission"
)

// deviceTaintTimes returns a plugin that sets the time at which a device taint was added.
func deviceTaintTimes(clock func() time.Time) func(context.Context, *admission.Attempt) error {
	return func(_ context.Context, a *admission.Attempt) error {
		if s, ok := a.Whole.(*resourcev1.ResourceSlice); ok && (a.CreatesObject() || a.UpdatesObject()) {
			old, _ := a.Stored.(*resourcev1.ResourceSlice)
			resource.SetDeviceTaintTimes(s, old, metav1.NewTime(clock().UTC().Truncate(time.Second)))
		}
		return nil
	}
}

// deviceAdmins returns a plugin that allows admin access to devices only in namespaces with the
// label resource.kubernetes.io/admin-access. Admin access bypasses existing allocations. The rule
// covers ResourceClaims, ResourceClaimTemplates and allocations.
func deviceAdmins(c admission.Cluster) func(context.Context, *admission.Attempt) error {
	return func(ctx context.Context, a *admission.Attempt) error {
		if a.Kind.GVK.Group != resourcev1.GroupName || a.Whole == nil {
			return nil
		}
		at := resource.DeviceAdminAccess(a.Whole, a.Stored)
		if at == nil {
			return nil
		}
		o, ok := c.Get(ctx, "namespaces", "", a.Namespace)
		if !ok || !requireDeviceAdmin(o) { // the label may be newer than the cache
			o, ok = c.Newest(ctx, "namespaces", "", a.Namespace)
		}
		var errs field.ErrorList
		if !ok {
			errs = append(errs, field.InternalError(at,
				fmt.Errorf("could not retrieve namespace to verify admin access: %q is not there", a.Namespace)))
		} else if !requireDeviceAdmin(o) {
			errs = append(errs, field.Forbidden(at,
				fmt.Sprintf("admin access to devices requires the `%s: true` label on the containing namespace",
					resourcev1.DRAAdminNamespaceLabelKey)))
		}
		if len(errs) == 0 {
			return nil
		}
		return apierrors.NewInvalid(a.Kind.GVK.GroupKind(), a.Whole.GetName(), errs)
	}
}

func requireDeviceAdmin(namespace api.Object) bool {
	return namespace.GetLabels()[resourcev1.DRAAdminNamespaceLabelKey] == "true"
}
