package builtin

import (
	"context"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/rand"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/podref"
	"keelson.dev/keelson/controlplane/apiserver/admission"
	"keelson.dev/keelson/internal/wait"
)

const (
	defaultServiceAccount = "default"
	tokenMountPath        = "/var/run/secrets/kubernetes.io/serviceaccount"
	tokenVolumePrefix     = "kube-api-access-"
	rootCAConfigMap       = "kube-root-ca.crt"
	// tokenSeconds is slightly more than an hour, so that a renewal at 80% has slack.
	tokenSeconds = 3607
	// accountWait is how long a new pod waits for the default ServiceAccount of a new namespace.
	accountWait = 1500 * time.Millisecond
)

// serviceAccount returns a plugin that sets the ServiceAccount of a new pod. Unless disabled, it
// mounts a volume with a token, the cluster CA and the namespace.
func serviceAccount(c admission.Cluster) func(ctx context.Context, a *api.Attempt) error {
	return func(ctx context.Context, a *api.Attempt) error {
		if !a.IsCoreResource("pods") || !a.CreatesObject() {
			return nil
		}
		pod := a.Whole.(*corev1.Pod)
		if podref.IsMirror(pod) {
			return nil // mirror pods have no ServiceAccount; the plugin MirrorPods enforces it
		}
		if pod.Spec.ServiceAccountName == "" {
			pod.Spec.ServiceAccountName = defaultServiceAccount
		}
		pod.Spec.DeprecatedServiceAccount = pod.Spec.ServiceAccountName
		sa, err := getServiceAccount(ctx, c, a.Namespace, pod.Spec.ServiceAccountName)
		if err != nil {
			return admission.NewForbidden(a, pod, fmt.Errorf("error looking up service account %s/%s: %w", a.Namespace,
				pod.Spec.ServiceAccountName, err))
		}
		if len(pod.Spec.ImagePullSecrets) == 0 {
			pod.Spec.ImagePullSecrets = append(pod.Spec.ImagePullSecrets, sa.ImagePullSecrets...)
		}
		if wantsToken(pod, sa) {
			mountToken(pod)
		}
		return nil
	}
}

// getServiceAccount returns a ServiceAccount. If it is the default ServiceAccount, which a
// controller creates in a new namespace, getServiceAccount waits up to accountWait for it.
func getServiceAccount(ctx context.Context, c admission.Cluster, namespace, name string) (
	*corev1.ServiceAccount, error,
) {
	var sa *corev1.ServiceAccount
	look := func() error {
		o, ok := c.Get(ctx, "serviceaccounts", namespace, name)
		if !ok {
			return apierrors.NewNotFound(schema.GroupResource{Resource: "serviceaccount"}, name)
		}
		sa = o.(*corev1.ServiceAccount)
		return nil
	}
	err := look()
	if err == nil || name != defaultServiceAccount {
		return sa, err
	}
	late, cancel := context.WithTimeout(ctx, accountWait)
	defer cancel()
	if wait.For(late, 20*time.Millisecond, look) == nil {
		return sa, nil
	}
	return nil, err
}

func wantsToken(pod *corev1.Pod, sa *corev1.ServiceAccount) bool {
	switch {
	case pod.Spec.AutomountServiceAccountToken != nil:
		return *pod.Spec.AutomountServiceAccountToken
	case sa.AutomountServiceAccountToken != nil:
		return *sa.AutomountServiceAccountToken
	}
	return true
}

// mountToken mounts a token volume at the well-known path of each container that has no mount
// there. It adds the volume if the pod has none.
func mountToken(pod *corev1.Pod) {
	volume := ""
	for _, v := range pod.Spec.Volumes {
		if len(v.Name) > len(tokenVolumePrefix) && v.Name[:len(tokenVolumePrefix)] == tokenVolumePrefix &&
			v.Projected != nil {
			volume = v.Name
		}
	}
	add := volume == ""
	if add {
		volume = tokenVolumePrefix + rand.String(5)
	}
	mounted := false
	for _, containers := range [][]corev1.Container{pod.Spec.InitContainers, pod.Spec.Containers} {
		for i := range containers {
			if mountedAt(&containers[i], tokenMountPath) {
				continue
			}
			containers[i].VolumeMounts = append(containers[i].VolumeMounts, corev1.VolumeMount{
				Name: volume, ReadOnly: true, MountPath: tokenMountPath,
			})
			mounted = true
		}
	}
	if mounted && add {
		pod.Spec.Volumes = append(pod.Spec.Volumes, tokenVolume(volume))
	}
}

func mountedAt(c *corev1.Container, path string) bool {
	for _, m := range c.VolumeMounts {
		if m.MountPath == path {
			return true
		}
	}
	return false
}

func tokenVolume(name string) corev1.Volume {
	mode, seconds := int32(0o644), int64(tokenSeconds)
	return corev1.Volume{Name: name, VolumeSource: corev1.VolumeSource{Projected: &corev1.ProjectedVolumeSource{
		DefaultMode: &mode,
		Sources: []corev1.VolumeProjection{
			{ServiceAccountToken: &corev1.ServiceAccountTokenProjection{Path: "token", ExpirationSeconds: &seconds}},
			{ConfigMap: &corev1.ConfigMapProjection{
				LocalObjectReference: corev1.LocalObjectReference{Name: rootCAConfigMap},
				Items:                []corev1.KeyToPath{{Key: "ca.crt", Path: "ca.crt"}},
			}},
			{DownwardAPI: &corev1.DownwardAPIProjection{Items: []corev1.DownwardAPIVolumeFile{{
				Path:     "namespace",
				FieldRef: &corev1.ObjectFieldSelector{APIVersion: "v1", FieldPath: "metadata.namespace"},
			}}}},
		},
	}}}
}
