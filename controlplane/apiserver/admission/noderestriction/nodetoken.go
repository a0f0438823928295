package noderestriction

import (
	"context"
	"fmt"
	"slices"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/podref"
	"keelson.dev/keelson/controlplane/apiserver/admission"
)

// restrictToken allows an agent to request only tokens that are bound to its own pods.
func restrictToken(ctx context.Context, c admission.Cluster, a *api.Attempt, node string) error {
	tr, ok := a.Object.(*authenticationv1.TokenRequest)
	if !ok {
		return nil
	}
	ref := tr.Spec.BoundObjectRef
	if ref == nil || ref.APIVersion != "v1" || ref.Kind != "Pod" || ref.Name == "" {
		return admission.NewForbidden(a, nil, fmt.Errorf("node requested token not bound to a pod"))
	}
	if ref.UID == "" {
		return admission.NewForbidden(a, nil, fmt.Errorf("node requested token with a pod binding without a uid"))
	}
	o, ok := c.Get(ctx, "pods", a.Namespace, ref.Name)
	if !ok {
		return admission.NewNotFound("pods", ref.Name)
	}
	pod := o.(*corev1.Pod)
	switch {
	case pod.UID != ref.UID:
		return admission.NewForbidden(a, nil,
			fmt.Errorf("the UID in the bound object reference (%s) does not match the UID in record. The object might "+
				"have been deleted and then recreated", ref.UID))
	case pod.Spec.NodeName != node:
		return admission.NewForbidden(a, nil,
			fmt.Errorf("node requested token bound to a pod scheduled on a different node"))
	case podref.IsMirror(pod):
		return admission.NewForbidden(a, nil, fmt.Errorf("node requested token bound to a mirror pod"))
	case pod.Spec.ServiceAccountName != a.Name:
		return admission.NewForbidden(a, nil,
			fmt.Errorf("node requested token for a service account that the pod does not use"))
	}
	return restrictAudience(ctx, c, a, pod, tr.Spec.Audiences)
}

// restrictAudience returns an error unless a volume of the pod needs a token for the requested
// audience. The volume is a projected token, or its CSI driver requests tokens. The empty audience
// is the API server.
func restrictAudience(
	ctx context.Context, c admission.Cluster, a *api.Attempt, pod *corev1.Pod, audiences []string,
) error {
	audience := ""
	switch len(audiences) {
	case 0:
	case 1:
		audience = audiences[0]
	default:
		return admission.NewForbidden(a, nil, fmt.Errorf("node may only request 0 or 1 audiences"))
	}
	for i := range pod.Spec.Volumes {
		v := &pod.Spec.Volumes[i]
		if projectsToken(v, audience) || driverWants(ctx, c, csiDriver(ctx, c, pod, v), audience) {
			return nil
		}
	}
	return admission.NewForbidden(a, nil, fmt.Errorf("audience %q not found in pod spec volume", audience))
}

func projectsToken(v *corev1.Volume, audience string) bool {
	return v.Projected != nil && slices.ContainsFunc(v.Projected.Sources, func(s corev1.VolumeProjection) bool {
		return s.ServiceAccountToken != nil && s.ServiceAccountToken.Audience == audience
	})
}

// csiDriver returns the name of the CSI driver of a pod's volume; "" if the volume has none.
func csiDriver(ctx context.Context, c admission.Cluster, pod *corev1.Pod, v *corev1.Volume) string {
	claim := ""
	switch {
	case v.CSI != nil:
		return v.CSI.Driver
	case v.PersistentVolumeClaim != nil:
		claim = v.PersistentVolumeClaim.ClaimName
	case v.Ephemeral != nil:
		claim = pod.Name + "-" + v.Name
	}
	o, ok := c.Get(ctx, "persistentvolumeclaims", pod.Namespace, claim)
	if !ok {
		return ""
	}
	o, ok = c.Get(ctx, "persistentvolumes", "", o.(*corev1.PersistentVolumeClaim).Spec.VolumeName)
	if !ok {
		return ""
	}
	if csi := o.(*corev1.PersistentVolume).Spec.CSI; csi != nil {
		return csi.Driver
	}
	return ""
}

func driverWants(ctx context.Context, c admission.Cluster, driver, audience string) bool {
	o, ok := c.Get(ctx, "csidrivers", "", driver)
	return ok && slices.ContainsFunc(o.(*storagev1.CSIDriver).Spec.TokenRequests, func(t storagev1.TokenRequest) bool {
		return t.Audience == audience
	})
}
