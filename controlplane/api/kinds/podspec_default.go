package kinds

import (
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
)

// Defaults of a pod that others compare with.
const (
	DefaultGracePeriodSeconds = int64(30)
	DefaultFileMode           = int32(0o644)
	DefaultTokenSeconds       = int64(3600) // life of a projected service account token
)

// DefaultPodTemplate fills what a template leaves out. Resources, host ports and
// service links are filled only in pods themselves, so that a template stays
// what its author wrote and its hash with it.
func DefaultPodTemplate(t *corev1.PodTemplateSpec) { DefaultPodSpec(&t.Spec) }

// DefaultPodSpec fills what a pod's specification leaves out, in pods and templates alike.
func DefaultPodSpec(s *corev1.PodSpec) {
	setDefault(&s.DNSPolicy, corev1.DNSClusterFirst)
	setDefault(&s.RestartPolicy, corev1.RestartPolicyAlways)
	setDefaultPtr(&s.SecurityContext, corev1.PodSecurityContext{})
	setDefaultPtr(&s.TerminationGracePeriodSeconds, DefaultGracePeriodSeconds)
	setDefault(&s.SchedulerName, corev1.DefaultSchedulerName)
	// The two names of one field, of which older clients write only the second.
	setDefault(&s.ServiceAccountName, s.DeprecatedServiceAccount)
	s.DeprecatedServiceAccount = s.ServiceAccountName
	for i := range s.Volumes {
		defaultVolume(&s.Volumes[i].VolumeSource)
	}
	for i := range s.InitContainers {
		defaultContainer(&s.InitContainers[i])
	}
	for i := range s.Containers {
		defaultContainer(&s.Containers[i])
	}
	for i := range s.EphemeralContainers {
		c := corev1.Container(s.EphemeralContainers[i].EphemeralContainerCommon)
		defaultContainer(&c)
		s.EphemeralContainers[i].EphemeralContainerCommon = corev1.EphemeralContainerCommon(c)
	}
}

// defaultPod fills what only a pod itself has filled.
func defaultPod(p *corev1.Pod) {
	DefaultPodSpec(&p.Spec)
	setDefaultPtr(&p.Spec.EnableServiceLinks, corev1.DefaultEnableServiceLinks)
	for _, list := range [][]corev1.Container{p.Spec.InitContainers, p.Spec.Containers} {
		for i := range list {
			requestWhatIsLimited(&list[i].Resources)
			if p.Spec.HostNetwork {
				for j := range list[i].Ports {
					setDefault(&list[i].Ports[j].HostPort, list[i].Ports[j].ContainerPort)
				}
			}
		}
	}
	setDefault(&p.Status.Phase, corev1.PodPending)
	// PrepareCreate empties the status; defaulting runs once more after the
	// mutating stage, so the class is that of the resources as admitted.
	setDefault(&p.Status.QOSClass, QOSClass(&p.Spec))
}

func requestWhatIsLimited(r *corev1.ResourceRequirements) {
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
		if imageTag(c.Image) == "latest" {
			c.ImagePullPolicy = corev1.PullAlways
		}
	}
	setDefault(&c.TerminationMessagePath, corev1.TerminationMessagePathDefault)
	setDefault(&c.TerminationMessagePolicy, corev1.TerminationMessageReadFile)
	for i := range c.Ports {
		setDefault(&c.Ports[i].Protocol, corev1.ProtocolTCP)
	}
	for i := range c.Env {
		if from := c.Env[i].ValueFrom; from != nil && from.FieldRef != nil {
			setDefault(&from.FieldRef.APIVersion, "v1")
		}
	}
	roundResources(c.Resources.Limits)
	roundResources(c.Resources.Requests)
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
	setDefault(&p.TimeoutSeconds, 1)
	setDefault(&p.PeriodSeconds, 10)
	setDefault(&p.SuccessThreshold, 1)
	setDefault(&p.FailureThreshold, 3)
	if p.HTTPGet != nil {
		defaultHTTPGet(p.HTTPGet)
	}
	if p.GRPC != nil {
		setDefaultPtr(&p.GRPC.Service, "")
	}
}

func defaultHTTPGet(h *corev1.HTTPGetAction) {
	setDefault(&h.Path, "/")
	setDefault(&h.Scheme, corev1.URISchemeHTTP)
}

// imageTag is the tag of an image's name: "latest" when it has neither tag nor
// digest, "" when a digest alone pins it.
func imageTag(image string) string {
	name, _, pinned := strings.Cut(image, "@")
	if i := strings.LastIndexByte(name, ':'); i > strings.LastIndexByte(name, '/') {
		return name[i+1:]
	}
	if pinned {
		return ""
	}
	return "latest"
}

// roundResources drops what is finer than a thousandth: nothing is accounted finer.
func roundResources(l corev1.ResourceList) {
	for name, q := range l {
		if exact := q.RoundUp(resource.Milli); !exact {
			l[name] = q
		}
	}
}

func defaultVolume(v *corev1.VolumeSource) {
	if countSet(*v) == 0 {
		v.EmptyDir = &corev1.EmptyDirVolumeSource{}
	}
	switch {
	case v.HostPath != nil:
		setDefaultPtr(&v.HostPath.Type, corev1.HostPathUnset)
	case v.ISCSI != nil:
		setDefault(&v.ISCSI.ISCSIInterface, "default")
	case v.Secret != nil:
		setDefaultPtr(&v.Secret.DefaultMode, DefaultFileMode)
	case v.ConfigMap != nil:
		setDefaultPtr(&v.ConfigMap.DefaultMode, DefaultFileMode)
	case v.DownwardAPI != nil:
		setDefaultPtr(&v.DownwardAPI.DefaultMode, DefaultFileMode)
		defaultDownward(v.DownwardAPI.Items)
	case v.Ephemeral != nil && v.Ephemeral.VolumeClaimTemplate != nil:
		setDefaultPtr(&v.Ephemeral.VolumeClaimTemplate.Spec.VolumeMode, corev1.PersistentVolumeFilesystem)
	case v.Projected != nil:
		setDefaultPtr(&v.Projected.DefaultMode, DefaultFileMode)
		for i := range v.Projected.Sources {
			p := &v.Projected.Sources[i]
			if p.ServiceAccountToken != nil {
				setDefaultPtr(&p.ServiceAccountToken.ExpirationSeconds, DefaultTokenSeconds)
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
			setDefault(&r.APIVersion, "v1")
		}
	}
}
