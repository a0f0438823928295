package podspec

import (
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"keelson.dev/keelson/controlplane/api/kinds/builder"
	"keelson.dev/keelson/controlplane/api/kinds/fieldrules"
)

// Defaults of pods that other packages use for comparisons.
const (
	DefaultGracePeriodSeconds = int64(30)
	DefaultFileMode           = int32(0o644)
	DefaultTokenSeconds       = int64(3600) // lifetime of a projected service account token
)

// DefaultPodSpec sets the defaults of a pod spec that pods and pod templates have in common.
func DefaultPodSpec(spec *corev1.PodSpec) {
	builder.SetDefault(&spec.DNSPolicy, corev1.DNSClusterFirst)
	builder.SetDefault(&spec.RestartPolicy, corev1.RestartPolicyAlways)
	builder.SetDefaultPtr(&spec.SecurityContext, corev1.PodSecurityContext{})
	builder.SetDefaultPtr(&spec.TerminationGracePeriodSeconds, DefaultGracePeriodSeconds)
	builder.SetDefault(&spec.SchedulerName, corev1.DefaultSchedulerName)
	// serviceAccount is the deprecated name of serviceAccountName; older clients set only
	// serviceAccount.
	builder.SetDefault(&spec.ServiceAccountName, spec.DeprecatedServiceAccount)
	spec.DeprecatedServiceAccount = spec.ServiceAccountName
	if spec.Resources != nil {
		RoundResources(spec.Resources.Limits)
		RoundResources(spec.Resources.Requests)
	}
	for i := range spec.Volumes {
		DefaultVolume(&spec.Volumes[i].VolumeSource)
	}
	for i := range spec.InitContainers {
		defaultContainer(&spec.InitContainers[i])
	}
	for i := range spec.Containers {
		defaultContainer(&spec.Containers[i])
	}
	for i := range spec.EphemeralContainers {
		c := corev1.Container(spec.EphemeralContainers[i].EphemeralContainerCommon)
		defaultContainer(&c)
		spec.EphemeralContainers[i].EphemeralContainerCommon = corev1.EphemeralContainerCommon(c)
	}
}

// defaultPod sets the defaults that pods have and pod templates do not.
func defaultPod(pod *corev1.Pod) {
	DefaultPodSpec(&pod.Spec)
	builder.SetDefaultPtr(&pod.Spec.EnableServiceLinks, corev1.DefaultEnableServiceLinks)
	for _, list := range [][]corev1.Container{pod.Spec.InitContainers, pod.Spec.Containers} {
		for i := range list {
			defaultRequests(&list[i].Resources)
			if pod.Spec.HostNetwork {
				for j := range list[i].Ports {
					builder.SetDefault(&list[i].Ports[j].HostPort, list[i].Ports[j].ContainerPort)
				}
			}
		}
	}
	defaultPodResources(pod)
	builder.SetDefault(&pod.Status.Phase, corev1.PodPending)
	// PrepareCreate clears the status. Defaulting runs again after mutating admission, so the class
	// is computed from the admitted resources.
	builder.SetDefault(&pod.Status.QOSClass, QOSClass(&pod.Spec))
}

func defaultRequests(r *corev1.ResourceRequirements) {
	for name, q := range r.Limits {
		if _, given := r.Requests[name]; given {
			continue
		}
		if r.Requests == nil {
			r.Requests = corev1.ResourceList{}
		}
		r.Requests[name] = q.DeepCopy()
	}
}

func defaultContainer(c *corev1.Container) {
	if c.ImagePullPolicy == "" {
		c.ImagePullPolicy = corev1.PullIfNotPresent
		if ImageTag(c.Image) == "latest" {
			c.ImagePullPolicy = corev1.PullAlways
		}
	}
	builder.SetDefault(&c.TerminationMessagePath, corev1.TerminationMessagePathDefault)
	builder.SetDefault(&c.TerminationMessagePolicy, corev1.TerminationMessageReadFile)
	for i := range c.Ports {
		builder.SetDefault(&c.Ports[i].Protocol, corev1.ProtocolTCP)
	}
	for i := range c.Env {
		if from := c.Env[i].ValueFrom; from != nil && from.FieldRef != nil {
			builder.SetDefault(&from.FieldRef.APIVersion, "v1")
		}
	}
	RoundResources(c.Resources.Limits)
	RoundResources(c.Resources.Requests)
	for _, p := range []*corev1.Probe{c.LivenessProbe, c.ReadinessProbe, c.StartupProbe} {
		if p != nil {
			defaultProbe(p)
		}
	}
	if l := c.Lifecycle; l != nil {
		for _, h := range []*corev1.LifecycleHandler{l.PostStart, l.PreStop} {
			if h != nil && h.HTTPGet != nil {
				defaultHTTPGet(h.HTTPGet)
			}
		}
	}
}

func defaultProbe(p *corev1.Probe) {
	builder.SetDefault(&p.TimeoutSeconds, 1)
	builder.SetDefault(&p.PeriodSeconds, 10)
	builder.SetDefault(&p.SuccessThreshold, 1)
	builder.SetDefault(&p.FailureThreshold, 3)
	if p.HTTPGet != nil {
		defaultHTTPGet(p.HTTPGet)
	}
	if p.GRPC != nil {
		builder.SetDefaultPtr(&p.GRPC.Service, "")
	}
}

func defaultHTTPGet(h *corev1.HTTPGetAction) {
	builder.SetDefault(&h.Path, "/")
	builder.SetDefault(&h.Scheme, corev1.URISchemeHTTP)
}

// ImageTag returns the tag of an image reference. It returns "latest" if the reference has neither
// tag nor digest, and "" if it has only a digest.
func ImageTag(image string) string {
	name, _, pinned := strings.Cut(image, "@")
	if i := strings.LastIndexByte(name, ':'); i > strings.LastIndexByte(name, '/') {
		return name[i+1:]
	}
	if pinned {
		return ""
	}
	return "latest"
}

// RoundResources rounds quantities up to thousandths, the smallest unit that is accounted.
func RoundResources(l corev1.ResourceList) {
	for name, q := range l {
		if exact := q.RoundUp(resource.Milli); !exact {
			l[name] = q
		}
	}
}

// DefaultVolume sets the defaults of a volume source.
func DefaultVolume(v *corev1.VolumeSource) {
	if fieldrules.CountSet(*v) == 0 {
		v.EmptyDir = &corev1.EmptyDirVolumeSource{}
	}
	switch {
	case v.HostPath != nil:
		builder.SetDefaultPtr(&v.HostPath.Type, corev1.HostPathUnset)
	case v.ISCSI != nil:
		builder.SetDefault(&v.ISCSI.ISCSIInterface, "default")
	case v.Secret != nil:
		builder.SetDefaultPtr(&v.Secret.DefaultMode, DefaultFileMode)
	case v.ConfigMap != nil:
		builder.SetDefaultPtr(&v.ConfigMap.DefaultMode, DefaultFileMode)
	case v.DownwardAPI != nil:
		builder.SetDefaultPtr(&v.DownwardAPI.DefaultMode, DefaultFileMode)
		defaultDownward(v.DownwardAPI.Items)
	case v.Ephemeral != nil && v.Ephemeral.VolumeClaimTemplate != nil:
		builder.SetDefaultPtr(&v.Ephemeral.VolumeClaimTemplate.Spec.VolumeMode, corev1.PersistentVolumeFilesystem)
	case v.Projected != nil:
		builder.SetDefaultPtr(&v.Projected.DefaultMode, DefaultFileMode)
		for i := range v.Projected.Sources {
			p := &v.Projected.Sources[i]
			if p.ServiceAccountToken != nil {
				builder.SetDefaultPtr(&p.ServiceAccountToken.ExpirationSeconds, DefaultTokenSeconds)
			}
			if p.DownwardAPI != nil {
				defaultDownward(p.DownwardAPI.Items)
			}
		}
	}
}

func defaultDownward(items []corev1.DownwardAPIVolumeFile) {
	for i := range items {
		if r := items[i].FieldRef; r != nil {
			builder.SetDefault(&r.APIVersion, "v1")
		}
	}
}
