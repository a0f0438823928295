package podspec

import (
	"fmt"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	utilvalidation "k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"keelson.dev/keelson/controlplane/api/kinds/fieldrules"
)

// Warnings collects the warnings about one object.
type Warnings []string

// Add appends a warning about the field at fldPath.
func (w *Warnings) Add(fldPath *field.Path, format string, args ...any) {
	*w = append(*w, fldPath.String()+": "+fmt.Sprintf(format, args...))
}

// DeprecatedNodeLabels maps deprecated labels of nodes to the advice that Kubernetes gives in its
// warning.
var DeprecatedNodeLabels = map[string]string{
	"beta.kubernetes.io/arch": `deprecated since v1.14; use "kubernetes.io/arch" instead`,
	"beta.kubernetes.io/os":   `deprecated since v1.14; use "kubernetes.io/os" instead`,
	"failure-domain.beta.kubernetes.io/region": `deprecated since v1.17; use ` +
		`"topology.kubernetes.io/region" instead`,
	"failure-domain.beta.kubernetes.io/zone": `deprecated since v1.17; use ` +
		`"topology.kubernetes.io/zone" instead`,
	"beta.kubernetes.io/instance-type": `deprecated since v1.17; use ` +
		`"node.kubernetes.io/instance-type" instead`,
	"app.kubernetes.io/created-by":                  "deprecated since v1.9",
	"scheduler.alpha.kubernetes.io/preferAvoidPods": "deprecated since v1.22; use Taints and Tolerations instead",
	"node-role.kubernetes.io/master":                `use "node-role.kubernetes.io/control-plane" instead`,
}

// AddNodeTerm adds warnings about deprecated labels in a node selector term. If checkValues is
// true, it also warns of values that are not valid label values.
func (w *Warnings) AddNodeTerm(t *corev1.NodeSelectorTerm, checkValues bool, fldPath *field.Path) {
	for i, e := range t.MatchExpressions {
		here := fldPath.Child("matchExpressions").Index(i)
		if why := DeprecatedNodeLabels[e.Key]; why != "" {
			w.Add(here.Child("key"), "%s is %s", e.Key, why)
		}
		if !checkValues {
			continue
		}
		for j, value := range e.Values {
			for _, why := range utilvalidation.IsValidLabelValue(value) {
				w.Add(here.Child("values").Index(j), "%s is invalid, %s", value, why)
			}
		}
	}
}

// addFractionalBytes adds a warning for each of the given resources with a quantity in the list
// that is not a whole number of bytes.
func (w *Warnings) addFractionalBytes(list corev1.ResourceList, fldPath *field.Path, names ...corev1.ResourceName) {
	for _, name := range names {
		if q, ok := list[name]; ok && !isWhole(q) {
			w.Add(fldPath.Key(string(name)), "fractional byte value %q is invalid, must be an integer", q.String())
		}
	}
}

// PodWarnings returns the warnings about a pod. For a pod template, fldPath is the path of the
// template; for a pod it is nil.
func PodWarnings(podSpec *corev1.PodSpec, meta *metav1.ObjectMeta, fldPath *field.Path) []string {
	var w Warnings
	spec := fldPath.Child("spec")
	w.addPlacement(podSpec, spec)
	for _, key := range []string{"scheduler.alpha.kubernetes.io/critical-pod", "security.alpha.kubernetes.io/sysctls",
		"security.alpha.kubernetes.io/unsafe-sysctls"} {
		if _, set := meta.Annotations[key]; set && strings.HasPrefix(key, "scheduler.") {
			w.Add(fldPath.Child("metadata", "annotations").Key(key),
				`non-functional in v1.16+; use the "priorityClassName" field instead`)
		} else if set {
			w.Add(fldPath.Child("metadata", "annotations").Key(key),
				`non-functional in v1.11+; use the "sysctls" field instead`)
		}
	}
	for i := range podSpec.Volumes {
		if e := podSpec.Volumes[i].Ephemeral; e != nil && e.VolumeClaimTemplate != nil {
			w.AddClaim(&e.VolumeClaimTemplate.Spec,
				spec.Child("volumes").Index(i).Child("ephemeral", "volumeClaimTemplate", "spec"))
		}
	}
	w = append(w, overlappingPaths(podSpec.Volumes)...)
	w.addDuplicateNames(podSpec, spec)
	w.addFractionalBytes(podSpec.Overhead, spec.Child("overhead"), corev1.ResourceMemory,
		corev1.ResourceEphemeralStorage)
	w.addSecurityAnnotations(podSpec, meta, fldPath)
	w.addContainers(podSpec, spec)
	w.addPorts(podSpec, spec)
	if g := podSpec.TerminationGracePeriodSeconds; g != nil && *g < 0 {
		w.Add(spec.Child("terminationGracePeriodSeconds"),
			"must be >= 0; negative values are invalid and will be treated as 1")
	}
	w.addPodAffinity(podSpec.Affinity, spec.Child("affinity"))
	if podSpec.DNSConfig != nil {
		for i, ns := range podSpec.DNSConfig.Nameservers {
			w = append(w, utilvalidation.GetWarningsForIP(spec.Child("dnsConfig", "nameservers").Index(i), ns)...)
		}
	}
	for i, a := range podSpec.HostAliases {
		w = append(w, utilvalidation.GetWarningsForIP(spec.Child("hostAliases").Index(i).Child("ip"), a.IP)...)
	}
	return w
}

func (w *Warnings) addPlacement(s *corev1.PodSpec, spec *field.Path) {
	for _, key := range fieldrules.SortedKeys(s.NodeSelector) {
		if why := DeprecatedNodeLabels[key]; why != "" {
			w.Add(spec.Child("nodeSelector").Key(key), "%s", why)
		}
	}
	if s.Affinity != nil && s.Affinity.NodeAffinity != nil {
		n, fldPath := s.Affinity.NodeAffinity, spec.Child("affinity", "nodeAffinity")
		if r := n.RequiredDuringSchedulingIgnoredDuringExecution; r != nil {
			for i := range r.NodeSelectorTerms {
				w.AddNodeTerm(&r.NodeSelectorTerms[i], false,
					fldPath.Child("requiredDuringSchedulingIgnoredDuringExecution", "nodeSelectorTerms").Index(i))
			}
		}
		for i := range n.PreferredDuringSchedulingIgnoredDuringExecution {
			w.AddNodeTerm(&n.PreferredDuringSchedulingIgnoredDuringExecution[i].Preference, true,
				fldPath.Child("preferredDuringSchedulingIgnoredDuringExecution").Index(i).Child("preference"))
		}
	}
	for i, t := range s.TopologySpreadConstraints {
		here := spec.Child("topologySpreadConstraints").Index(i)
		if why := DeprecatedNodeLabels[t.TopologyKey]; why != "" {
			w.Add(here.Child("topologyKey"), "%s is %s", t.TopologyKey, why)
		}
		if t.LabelSelector == nil {
			w.Add(here.Child("labelSelector"), noSelector)
		}
	}
}

const noSelector = "a null labelSelector results in matching no pod"

func (w *Warnings) addPodAffinity(a *corev1.Affinity, fldPath *field.Path) {
	if a == nil {
		return
	}
	const required, preferred = "requiredDuringSchedulingIgnoredDuringExecution",
		"preferredDuringSchedulingIgnoredDuringExecution"
	terms := func(hard []corev1.PodAffinityTerm, soft []corev1.WeightedPodAffinityTerm, fldPath *field.Path) {
		for i := range hard {
			if hard[i].LabelSelector == nil {
				w.Add(fldPath.Child(required).Index(i).Child("labelSelector"), noSelector)
			}
		}
		for i := range soft {
			if soft[i].PodAffinityTerm.LabelSelector == nil {
				w.Add(fldPath.Child(preferred).Index(i).Child("podAffinityTerm", "labelSelector"), noSelector)
			}
		}
	}
	if p := a.PodAffinity; p != nil {
		terms(p.RequiredDuringSchedulingIgnoredDuringExecution, p.PreferredDuringSchedulingIgnoredDuringExecution,
			fldPath.Child("podAffinity"))
	}
	if p := a.PodAntiAffinity; p != nil {
		terms(p.RequiredDuringSchedulingIgnoredDuringExecution, p.PreferredDuringSchedulingIgnoredDuringExecution,
			fldPath.Child("podAntiAffinity"))
	}
}

// addDuplicateNames adds warnings about duplicate host aliases and image pull secrets, and about
// image pull secrets without a name.
func (w *Warnings) addDuplicateNames(podSpec *corev1.PodSpec, spec *field.Path) {
	seen := map[string]bool{}
	for i, a := range podSpec.HostAliases {
		if seen[a.IP] {
			w.Add(spec.Child("hostAliases").Index(i).Child("ip"), "duplicate ip %q", a.IP)
		}
		seen[a.IP] = true
	}
	clear(seen)
	for i, r := range podSpec.ImagePullSecrets {
		if seen[r.Name] {
			w.Add(spec.Child("imagePullSecrets").Index(i).Child("name"), "duplicate name %q", r.Name)
		}
		seen[r.Name] = true
	}
	for i, r := range podSpec.ImagePullSecrets {
		if r.Name == "" {
			w.Add(spec.Child("imagePullSecrets").Index(i).Child("name"), "invalid empty name %q", r.Name)
		}
	}
}

// addSecurityAnnotations adds warnings about the deprecated annotations of seccomp and AppArmor.
// fldPath is the path of the pod template, or nil for a pod. It omits the AppArmor annotations of a
// pod, for which AppArmorWarnings returns warnings.
func (w *Warnings) addSecurityAnnotations(spec *corev1.PodSpec, meta *metav1.ObjectMeta, fldPath *field.Path) {
	annotations := fldPath.Child("metadata", "annotations")
	seccomp := func(key string, set bool) {
		if _, annotated := meta.Annotations[key]; annotated && !set {
			w.Add(annotations.Key(key), `non-functional in v1.27+; use the "seccompProfile" field instead`)
		}
	}
	seccomp(corev1.SeccompPodAnnotationKey, spec.SecurityContext != nil && spec.SecurityContext.SeccompProfile != nil)
	visitContainerSecurity(spec, fldPath.Child("spec"), func(name string, c *corev1.SecurityContext, _ *field.Path) {
		seccomp(corev1.SeccompContainerAnnotationKeyPrefix+name, c.SeccompProfile != nil)
		value, annotated := meta.Annotations[apparmorPrefix+name]
		if fldPath == nil || !annotated || c.AppArmorProfile != nil {
			return
		}
		if own := podApparmor(spec); own == nil || !fieldrules.SemanticEqual(own, apparmorProfile(value)) {
			*w = append(*w, apparmorWarning(annotations, name))
		}
	})
}

// visitContainers calls f for every container of a pod and its path: init containers, containers,
// ephemeral containers.
func visitContainers(podSpec *corev1.PodSpec, spec *field.Path, f func(c *corev1.Container, at *field.Path)) {
	for i := range podSpec.InitContainers {
		f(&podSpec.InitContainers[i], spec.Child("initContainers").Index(i))
	}
	for i := range podSpec.Containers {
		f(&podSpec.Containers[i], spec.Child("containers").Index(i))
	}
	for i := range podSpec.EphemeralContainers {
		c := corev1.Container(podSpec.EphemeralContainers[i].EphemeralContainerCommon)
		f(&c, spec.Child("ephemeralContainers").Index(i))
	}
}

// addContainers adds warnings about containers: quantities that are not whole numbers of bytes, and
// duplicate environment variables.
func (w *Warnings) addContainers(podSpec *corev1.PodSpec, spec *field.Path) {
	visitContainers(podSpec, spec, func(c *corev1.Container, fldPath *field.Path) {
		for _, name := range []corev1.ResourceName{corev1.ResourceMemory, corev1.ResourceEphemeralStorage} {
			w.addFractionalBytes(c.Resources.Limits, fldPath.Child("resources", "limits"), name)
			w.addFractionalBytes(c.Resources.Requests, fldPath.Child("resources", "requests"), name)
		}
		seen := map[string]bool{}
		for i, e := range c.Env {
			self := "$(" + e.Name + ")"
			if seen[e.Name] && (e.ValueFrom != nil || e.Value == self || !strings.Contains(e.Value, self)) {
				w.Add(fldPath.Child("env").Index(i),
					"hides previous definition of %q, which may be dropped when using apply", e.Name)
			}
			seen[e.Name] = true
		}
	})
}

// addPorts adds warnings about duplicate ports and port names of the pod.
func (w *Warnings) addPorts(s *corev1.PodSpec, spec *field.Path) {
	type portAt struct {
		at   *field.Path
		port corev1.ContainerPort
	}
	seen := map[string][]portAt{}
	visitContainers(s, spec, func(c *corev1.Container, fldPath *field.Path) {
		for i, p := range c.Ports {
			here := fldPath.Child("ports").Index(i)
			if p.HostIP != "" && p.HostPort == 0 {
				w.Add(here, "hostIP set without hostPort: %+v", p)
			}
			key := fmt.Sprintf("%d/%s", p.ContainerPort, p.Protocol)
			for _, o := range seen[key] {
				switch {
				case p.HostIP == o.port.HostIP && p.HostPort == o.port.HostPort:
					w.Add(here, "duplicate port definition with %s", o.at)
				case p.HostPort == 0 || o.port.HostPort == 0:
					w.Add(here, "overlapping port definition with %s", o.at)
				case p.HostPort == o.port.HostPort && (p.HostIP == "") != (o.port.HostIP == ""):
					w.Add(here, "dangerously ambiguous port definition with %s", o.at)
				}
			}
			seen[key] = append(seen[key], portAt{here, p})
		}
	})
	names := map[string]*field.Path{}
	visitContainers(s, spec, func(c *corev1.Container, fldPath *field.Path) {
		for i, p := range c.Ports {
			here := fldPath.Child("ports").Index(i)
			switch first := names[p.Name]; {
			case p.Name == "":
			case first == nil:
				names[p.Name] = here
			default:
				w.Add(here, "duplicate port name %q with %s, services and probes that select ports by name will use %s",
					p.Name, first, first)
			}
		}
	})
}

// AddClaim adds a warning for each storage size in the spec of a claim that is not a whole number
// of bytes.
func (w *Warnings) AddClaim(spec *corev1.PersistentVolumeClaimSpec, fldPath *field.Path) {
	w.addFractionalBytes(spec.Resources.Requests, fldPath.Child("resources", "requests"), corev1.ResourceStorage)
	w.addFractionalBytes(spec.Resources.Limits, fldPath.Child("resources", "limits"), corev1.ResourceStorage)
}
