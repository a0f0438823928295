package podspec

import (
	"fmt"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/validation"
	utilvalidation "k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/utils/ptr"

	"keelson.dev/keelson/controlplane/api/kinds/fieldrules"
)

// containerRole is the role of a container in its pod: container, init container, sidecar or
// ephemeral container.
type containerRole int

const (
	regular containerRole = iota
	initial
	sidecar // a restartable init container
	ephemeral
)

func validateContainers(
	s *corev1.PodSpec, volumes map[string]corev1.VolumeSource, fldPath *field.Path,
) field.ErrorList {
	var errs field.ErrorList
	if len(s.Containers) == 0 {
		errs = append(errs, field.Required(fldPath.Child("containers"), ""))
	}
	seen := map[string]bool{}
	unique := func(name string, here *field.Path) {
		switch {
		case name == "":
			errs = append(errs, field.Required(here, ""))
			return
		case seen[name]:
			errs = append(errs, field.Duplicate(here, name))
		default:
			errs = append(errs, fieldrules.InvalidErrors(here, name, utilvalidation.IsDNS1123Label(name))...)
		}
		seen[name] = true
	}
	for i := range s.Containers {
		c, here := &s.Containers[i], fldPath.Child("containers").Index(i)
		unique(c.Name, here.Child("name"))
		errs = append(errs, validateContainer(c, regular, s, volumes, here)...)
	}
	for i := range s.InitContainers {
		c, here := &s.InitContainers[i], fldPath.Child("initContainers").Index(i)
		unique(c.Name, here.Child("name"))
		role := initial
		if ptr.Deref(c.RestartPolicy, "") == corev1.ContainerRestartPolicyAlways {
			role = sidecar
		}
		errs = append(errs, validateContainer(c, role, s, volumes, here)...)
		// Init containers run one after the other, so each is checked alone. As in Kubernetes, the
		// path of the errors is that of the first init container.
		errs = append(errs, validateUniquePorts(s.InitContainers[i:i+1], fldPath.Child("initContainers"))...)
	}
	for i := range s.EphemeralContainers {
		e, here := &s.EphemeralContainers[i], fldPath.Child("ephemeralContainers").Index(i)
		unique(e.Name, here.Child("name"))
		c := corev1.Container(e.EphemeralContainerCommon)
		errs = append(errs, validateContainer(&c, ephemeral, s, volumes, here)...)
		if t := e.TargetContainerName; t != "" && !hasContainer(s, t) {
			errs = append(errs, field.NotFound(here.Child("targetContainerName"), t))
		}
	}
	return append(errs, validateHostPorts(s, fldPath)...)
}

func hasContainer(s *corev1.PodSpec, name string) bool {
	for _, list := range [][]corev1.Container{s.Containers, s.InitContainers} {
		for i := range list {
			if list[i].Name == name {
				return true
			}
		}
	}
	return false
}

func validateContainer(c *corev1.Container, role containerRole, s *corev1.PodSpec,
	volumes map[string]corev1.VolumeSource, fldPath *field.Path) field.ErrorList {
	var errs field.ErrorList
	if c.Image == "" {
		errs = append(errs, field.Required(fldPath.Child("image"), ""))
	}
	errs = append(errs, fieldrules.ValidateOneOf(c.ImagePullPolicy, fldPath.Child("imagePullPolicy"), corev1.PullAlways,
		corev1.PullIfNotPresent, corev1.PullNever)...)
	errs = append(errs, fieldrules.ValidateRequiredOneOf(c.TerminationMessagePolicy,
		fldPath.Child("terminationMessagePolicy"),
		corev1.TerminationMessageReadFile, corev1.TerminationMessageFallbackToLogsOnError)...)
	if role != ephemeral {
		errs = append(errs, validateRestarts(c, fldPath)...)
	}
	errs = append(errs, validatePorts(c.Ports, fldPath.Child("ports"))...)
	errs = append(errs, validateEnv(c.Env, fldPath.Child("env"))...)
	errs = append(errs, validateEnvFrom(c.EnvFrom, fldPath.Child("envFrom"))...)
	errs = append(errs, validateMounts(c, volumes, fldPath.Child("volumeMounts"))...)
	errs = append(errs, validateDevices(c, volumes, fldPath.Child("volumeDevices"))...)
	errs = append(errs, ValidateResources(&c.Resources, fldPath.Child("resources"))...)
	errs = append(errs, validateContainerSecurity(c.SecurityContext, s.HostUsers == nil || *s.HostUsers,
		fldPath.Child("securityContext"))...)
	errs = append(errs, validateResizePolicy(c.ResizePolicy, s.RestartPolicy, fldPath.Child("resizePolicy"))...)
	switch role {
	case ephemeral:
		return append(errs, validateDebugContainer(c, fldPath)...)
	case initial:
		for i, p := range c.ResizePolicy {
			if p.RestartPolicy == corev1.RestartContainer {
				errs = append(errs, field.Invalid(fldPath.Child("resizePolicy").Index(i).Child("restartPolicy"),
					p.RestartPolicy,
					"must not be set to 'RestartContainer' for non-sidecar initContainers"))
			}
		}
	}
	return append(errs, validateHealth(c, role, s, fldPath)...)
}

// validateDebugContainer returns errors for fields that an ephemeral container may not have.
func validateDebugContainer(c *corev1.Container, fldPath *field.Path) field.ErrorList {
	const no = "cannot be set for an Ephemeral Container"
	errs := fieldrules.ForbidSetFields(fldPath, no, map[string]bool{
		"ports": len(c.Ports) > 0, "livenessProbe": c.LivenessProbe != nil, "readinessProbe": c.ReadinessProbe != nil,
		"startupProbe": c.StartupProbe != nil, "lifecycle": c.Lifecycle != nil,
		"resources":    len(c.Resources.Limits)+len(c.Resources.Requests)+len(c.Resources.Claims) > 0,
		"resizePolicy": len(c.ResizePolicy) > 0, "restartPolicy": c.RestartPolicy != nil,
		"restartPolicyRules": len(c.RestartPolicyRules) > 0,
	})
	for i, m := range c.VolumeMounts {
		errs = append(errs, fieldrules.ForbidSetFields(fldPath.Child("volumeMounts").Index(i), no,
			map[string]bool{"subPath": m.SubPath != "", "subPathExpr": m.SubPathExpr != ""})...)
	}
	return errs
}

func validatePorts(ports []corev1.ContainerPort, fldPath *field.Path) field.ErrorList {
	var errs field.ErrorList
	names := map[string]bool{}
	for i, p := range ports {
		here := fldPath.Index(i)
		if p.Name != "" {
			if msgs := utilvalidation.IsValidPortName(p.Name); len(msgs) > 0 {
				errs = append(errs, fieldrules.InvalidErrors(here.Child("name"), p.Name, msgs)...)
			} else if names[p.Name] {
				errs = append(errs, field.Duplicate(here.Child("name"), p.Name))
			}
			names[p.Name] = true
		}
		if p.ContainerPort == 0 {
			errs = append(errs, field.Required(here.Child("containerPort"), ""))
		} else {
			errs = append(errs, fieldrules.InvalidErrors(here.Child("containerPort"), p.ContainerPort,
				utilvalidation.IsValidPortNum(int(p.ContainerPort)))...)
		}
		if p.HostPort != 0 {
			errs = append(errs, fieldrules.InvalidErrors(here.Child("hostPort"), p.HostPort,
				utilvalidation.IsValidPortNum(int(p.HostPort)))...)
		}
		errs = append(errs, fieldrules.ValidateProtocol(p.Protocol, here.Child("protocol"))...)
	}
	return errs
}

// validateHostPorts returns errors for duplicate host ports of a pod's containers. With
// hostNetwork, a host port must also equal the container port.
func validateHostPorts(s *corev1.PodSpec, fldPath *field.Path) field.ErrorList {
	var errs field.ErrorList
	for i := range s.Containers {
		for j, p := range s.Containers[i].Ports {
			here := fldPath.Child("containers").Index(i).Child("ports").Index(j).Child("hostPort")
			if s.HostNetwork && p.HostPort != 0 && p.HostPort != p.ContainerPort {
				errs = append(errs, field.Invalid(here, p.HostPort,
					"must match `containerPort` when `hostNetwork` is true"))
			}
		}
	}
	return append(errs, validateUniquePorts(s.Containers, fldPath.Child("containers"))...)
}

// validateUniquePorts returns errors for host ports that several containers use.
func validateUniquePorts(containers []corev1.Container, fldPath *field.Path) field.ErrorList {
	var errs field.ErrorList
	seen := map[string]bool{}
	for i := range containers {
		for j, p := range containers[i].Ports {
			key := fmt.Sprintf("%s/%s/%d", p.Protocol, p.HostIP, p.HostPort)
			if p.HostPort != 0 && seen[key] {
				errs = append(errs, field.Duplicate(fldPath.Index(i).Child("ports").Index(j).Child("hostPort"), key))
			}
			seen[key] = true
		}
	}
	return errs
}

func validateEnv(env []corev1.EnvVar, fldPath *field.Path) field.ErrorList {
	var errs field.ErrorList
	for i, e := range env {
		here := fldPath.Index(i)
		if e.Name == "" {
			errs = append(errs, field.Required(here.Child("name"), ""))
		} else {
			errs = append(errs, fieldrules.InvalidErrors(here.Child("name"), e.Name,
				utilvalidation.IsRelaxedEnvVarName(e.Name))...)
		}
		if e.ValueFrom == nil {
			continue
		}
		from := here.Child("valueFrom")
		switch n := fieldrules.CountSet(*e.ValueFrom); {
		case n == 0:
			errs = append(errs, field.Invalid(from, "",
				"must specify one of: `fieldRef`, `resourceFieldRef`, `configMapKeyRef`, `secretKeyRef` "+
					"or `fileKeyRef`"))
		case e.Value != "":
			errs = append(errs, field.Invalid(from, "", "may not be specified when `value` is not empty"))
		case n > 1:
			errs = append(errs, field.Invalid(from, "", "may not have more than one field specified at a time"))
		}
		if r := e.ValueFrom.FieldRef; r != nil {
			errs = append(errs, validateFieldRef(r, envFields, from.Child("fieldRef"))...)
		}
		if r := e.ValueFrom.ResourceFieldRef; r != nil {
			errs = append(errs, validateResourceRef(r, false, from.Child("resourceFieldRef"))...)
		}
		if r := e.ValueFrom.ConfigMapKeyRef; r != nil {
			errs = append(errs, validateKeyRef(r.Name, r.Key, from.Child("configMapKeyRef"))...)
		}
		if r := e.ValueFrom.SecretKeyRef; r != nil {
			errs = append(errs, validateKeyRef(r.Name, r.Key, from.Child("secretKeyRef"))...)
		}
		if r := e.ValueFrom.FileKeyRef; r != nil {
			errs = append(errs, validateFileKey(r, from.Child("fileKeyRef"))...)
		}
	}
	return errs
}

func validateFileKey(r *corev1.FileKeySelector, fldPath *field.Path) field.ErrorList {
	required := func(value, name string, errs field.ErrorList) field.ErrorList {
		if value == "" {
			return field.ErrorList{field.Required(fldPath.Child(name), "")}
		}
		return errs
	}
	errs := required(r.Key, "key", fieldrules.InvalidErrors(fldPath.Child("key"), r.Key,
		utilvalidation.IsRelaxedEnvVarName(r.Key)))
	errs = append(errs, required(r.VolumeName, "volumeName",
		fieldrules.ValidateDNSLabel(r.VolumeName, fldPath.Child("volumeName")))...)
	return append(errs, required(r.Path, "path", fieldrules.ValidateNoBacksteps(r.Path, fldPath.Child("path")))...)
}

func validateKeyRef(name, key string, fldPath *field.Path) field.ErrorList {
	errs := fieldrules.InvalidErrors(fldPath.Child("name"), name, validation.NameIsDNSSubdomain(name, false))
	if key == "" {
		return append(errs, field.Required(fldPath.Child("key"), ""))
	}
	return append(errs, fieldrules.InvalidErrors(fldPath.Child("key"), key, utilvalidation.IsConfigMapKey(key))...)
}

func validateEnvFrom(sources []corev1.EnvFromSource, fldPath *field.Path) field.ErrorList {
	var errs field.ErrorList
	for i, e := range sources {
		here := fldPath.Index(i)
		if e.Prefix != "" {
			errs = append(errs, fieldrules.InvalidErrors(here.Child("prefix"), e.Prefix,
				utilvalidation.IsRelaxedEnvVarName(e.Prefix))...)
		}
		switch n := fieldrules.CountSet(e); {
		case n == 0:
			errs = append(errs, field.Invalid(fldPath, "", "must specify one of: `configMapRef` or `secretRef`"))
		case n > 1:
			errs = append(errs, field.Invalid(fldPath, "", "may not have more than one field specified at a time"))
		}
		if r := e.ConfigMapRef; r != nil {
			errs = append(errs, validateEnvPrefix(r.Name, here.Child("configMapRef", "name"))...)
		}
		if r := e.SecretRef; r != nil {
			errs = append(errs, validateEnvPrefix(r.Name, here.Child("secretRef", "name"))...)
		}
	}
	return errs
}

// validateEnvPrefix returns an error if a name is empty or is not valid as the prefix of a DNS
// subdomain. For some names, Kubernetes requires only this.
func validateEnvPrefix(name string, fldPath *field.Path) field.ErrorList {
	if name == "" {
		return field.ErrorList{field.Required(fldPath, "")}
	}
	return fieldrules.InvalidErrors(fldPath, name, validation.NameIsDNSSubdomain(name, true))
}

// validateContainerSecurity validates a container's security context. hostUsers reports whether the
// pod has no user namespace.
func validateContainerSecurity(c *corev1.SecurityContext, hostUsers bool, fldPath *field.Path) field.ErrorList {
	if c == nil {
		return nil
	}
	var errs field.ErrorList
	if c.RunAsUser != nil {
		errs = append(errs, fieldrules.InvalidErrors(fldPath.Child("runAsUser"), *c.RunAsUser,
			utilvalidation.IsValidUserID(*c.RunAsUser))...)
	}
	if c.RunAsGroup != nil {
		errs = append(errs, fieldrules.InvalidErrors(fldPath.Child("runAsGroup"), *c.RunAsGroup,
			utilvalidation.IsValidGroupID(*c.RunAsGroup))...)
	}
	if c.AllowPrivilegeEscalation != nil && !*c.AllowPrivilegeEscalation {
		if ptr.Deref(c.Privileged, false) {
			errs = append(errs, field.Invalid(fldPath, c,
				"cannot set `allowPrivilegeEscalation` to false and `privileged` to true"))
		}
		if c.Capabilities != nil {
			for _, add := range c.Capabilities.Add {
				if add == "CAP_SYS_ADMIN" || add == "SYS_ADMIN" {
					errs = append(errs, field.Invalid(fldPath, c,
						"cannot set `allowPrivilegeEscalation` to false and `capabilities.Add` CAP_SYS_ADMIN"))
				}
			}
		}
	}
	if c.ProcMount != nil {
		errs = append(errs, fieldrules.ValidateSupported(*c.ProcMount, fldPath.Child("procMount"),
			corev1.DefaultProcMount,
			corev1.UnmaskedProcMount)...)
		if hostUsers && *c.ProcMount == corev1.UnmaskedProcMount {
			errs = append(errs, field.Invalid(fldPath.Child("procMount"), c.ProcMount,
				"`hostUsers` must be false to use `Unmasked`"))
		}
	}
	errs = append(errs, validateWindowsOptions(c.WindowsOptions, fldPath.Child("windowsOptions"))...)
	errs = append(errs, validateAppArmor(c.AppArmorProfile, fldPath.Child("appArmorProfile"))...)
	return append(errs, validateSeccomp(c.SeccompProfile, fldPath.Child("seccompProfile"))...)
}
