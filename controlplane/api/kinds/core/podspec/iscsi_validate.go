package podspec

import (
	"net/netip"
	"regexp"
	"strings"

	corev1 "k8s.io/api/core/v1"
	utilvalidation "k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

// longISCSIName is the error for a volume name and portal that together are too long for an
// interface name.
const (
	longISCSIName     = "Total length of <volume name>:<iscsi.targetPortal> must be under 64 characters if iscsi.initiatorName is specified."
	maxISCSIInterface = 64
)

// nodeNames matches the names of iSCSI targets and initiators: iqn, eui or naa, without characters
// that are unsafe in a file name.
var (
	nodeNames       = regexp.MustCompile(`^(iqn\.[0-9]{4}-[0-9]{2}\.[[:alnum:].-]+(:[^,;*&$|/\s]+)?|eui\.[[:xdigit:]]{16}|naa\.([[:xdigit:]]{16}|[[:xdigit:]]{32}))$`)
	iscsiInterfaces = regexp.MustCompile(`^[[:alnum:]][[:alnum:]._:-]{0,63}$`)
)

// mostPortals is the maximum number of a target's portals, to all of which a node logs in at once.
const mostPortals = 32

func validateInlineISCSI(s *corev1.ISCSIVolumeSource, at *field.Path) field.ErrorList {
	errs := validateISCSI(&corev1.ISCSIPersistentVolumeSource{TargetPortal: s.TargetPortal, IQN: s.IQN, Lun: s.Lun,
		ISCSIInterface: s.ISCSIInterface,
		Portals:        s.Portals, InitiatorName: s.InitiatorName}, "must be valid format starting with iqn, eui, or naa", at)
	if (s.DiscoveryCHAPAuth || s.SessionCHAPAuth) && s.SecretRef == nil {
		errs = append(errs, field.Required(at.Child("secretRef"), ""))
	}
	return errs
}

// ValidateISCSIVolume validates an iSCSI PersistentVolume. With initiatorName, the volume's name is
// part of the interface's name. Paths and texts are those of Kubernetes.
func ValidateISCSIVolume(s *corev1.ISCSIPersistentVolumeSource, volume string, at *field.Path) field.ErrorList {
	errs := validateISCSI(s, notISCSIName, at)
	if s.InitiatorName != nil && len(s.TargetPortal)+1+len(volume) > maxISCSIInterface {
		errs = append(errs, field.Invalid(at.Child("targetportal"), s.TargetPortal, longISCSIName))
	}
	switch {
	case s.SecretRef == nil && (s.DiscoveryCHAPAuth || s.SessionCHAPAuth):
		errs = append(errs, field.Required(at.Child("secretRef"), ""))
	case s.SecretRef != nil && s.SecretRef.Name == "":
		errs = append(errs, field.Required(at.Child("secretRef", "name"), ""))
	}
	return errs
}

const notISCSIName = "must be valid format"

// validateISCSI validates the common fields of iSCSI volumes in pods and in PersistentVolumes.
// otherKind is the error for a target name of an unknown type.
func validateISCSI(s *corev1.ISCSIPersistentVolumeSource, otherKind string, at *field.Path) field.ErrorList {
	var errs field.ErrorList
	if s.IQN == "" {
		errs = append(errs, field.Required(at.Child("iqn"), ""))
	} else {
		errs = append(errs, validateNodeName(s.IQN, otherKind, at.Child("iqn"))...)
	}
	if s.TargetPortal == "" {
		errs = append(errs, field.Required(at.Child("targetPortal"), ""))
	} else {
		errs = append(errs, validatePortal(s.TargetPortal, at.Child("targetPortal"))...)
	}
	if len(s.Portals) > mostPortals {
		errs = append(errs, field.TooMany(at.Child("portals"), len(s.Portals), mostPortals))
	} else {
		for i, p := range s.Portals {
			errs = append(errs, validatePortal(p, at.Child("portals").Index(i))...)
		}
	}
	if s.Lun < 0 || s.Lun > 255 {
		errs = append(errs, field.Invalid(at.Child("lun"), s.Lun, utilvalidation.InclusiveRangeError(0, 255)))
	}
	if s.ISCSIInterface != "" && !iscsiInterfaces.MatchString(s.ISCSIInterface) {
		errs = append(errs, field.Invalid(at.Child("iscsiInterface"), s.ISCSIInterface, "must be the name of an interface that iscsiadm has on the nodes, or default"))
	}
	if s.InitiatorName != nil {
		errs = append(errs, validateNodeName(*s.InitiatorName, otherKind, at.Child("initiatorname"))...)
	}
	return errs
}

func validateNodeName(name, otherKind string, at *field.Path) field.ErrorList {
	switch {
	case !strings.HasPrefix(name, "iqn") && !strings.HasPrefix(name, "eui") && !strings.HasPrefix(name, "naa"):
		return field.ErrorList{field.Invalid(at, name, otherKind)}
	case len(name) > 223:
		return field.ErrorList{field.TooLong(at, "", 223)}
	case !nodeNames.MatchString(name):
		return field.ErrorList{field.Invalid(at, name, notISCSIName)}
	}
	return nil
}

func validatePortal(portal string, at *field.Path) field.ErrorList {
	if p, err := netip.ParseAddrPort(portal); err == nil && p.Port() != 0 && p.Addr().Zone() == "" {
		return nil
	}
	if a, err := netip.ParseAddr(strings.TrimSuffix(strings.TrimPrefix(portal, "["), "]")); err == nil && a.Zone() == "" {
		return nil
	}
	return field.ErrorList{field.Invalid(at, portal, "must be an IP address, with a port where that is not 3260, as 192.0.2.1:3261 or [2001:db8::1]:3261")}
}
