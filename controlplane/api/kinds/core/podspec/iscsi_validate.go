package podspec

import (
	"net/netip"
	"regexp"
	"strings"

	corev1 "k8s.io/api/core/v1"
	utilvalidation "k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

// longISCSIName is the error for a volume name and portal that are together longer than the maximum
// length of an iSCSI interface name.
const (
	longISCSIName = "Total length of <volume name>:<iscsi.targetPortal> must be under 64 characters if " +
		"iscsi.initiatorName is specified."
	maxISCSIInterface = 64
)

// nodeNames matches the names of iSCSI targets and initiators: iqn, eui or naa, without characters
// that are unsafe in a file name.
var (
	nodeNames = regexp.MustCompile(`^(iqn\.[0-9]{4}-[0-9]{2}\.[[:alnum:].-]+(:[^,` +
		`;*&$|/\s]+)?|eui\.[[:xdigit:]]{16}|naa\.([[:xdigit:]]{16}|[[:xdigit:]]{32}))$`)
	iscsiInterfaces = regexp.MustCompile(`^[[:alnum:]][[:alnum:]._:-]{0,63}$`)
)

// mostPortals is the maximum number of portals of a target. A node logs in to all of them at once.
const mostPortals = 32

func validateInlineISCSI(s *corev1.ISCSIVolumeSource, fldPath *field.Path) field.ErrorList {
	errs := validateISCSI(&corev1.ISCSIPersistentVolumeSource{TargetPortal: s.TargetPortal, IQN: s.IQN, Lun: s.Lun,
		ISCSIInterface: s.ISCSIInterface,
		Portals:        s.Portals, InitiatorName: s.InitiatorName},
		"must be valid format starting with iqn, eui, or naa", fldPath)
	if (s.DiscoveryCHAPAuth || s.SessionCHAPAuth) && s.SecretRef == nil {
		errs = append(errs, field.Required(fldPath.Child("secretRef"), ""))
	}
	return errs
}

// ValidateISCSIVolume validates the iSCSI source of a PersistentVolume. If initiatorName is set,
// the volume's name is part of the name of the iSCSI interface. The paths and messages of the
// errors are those of Kubernetes.
func ValidateISCSIVolume(s *corev1.ISCSIPersistentVolumeSource, volume string, fldPath *field.Path) field.ErrorList {
	errs := validateISCSI(s, notISCSIName, fldPath)
	if s.InitiatorName != nil && len(s.TargetPortal)+1+len(volume) > maxISCSIInterface {
		errs = append(errs, field.Invalid(fldPath.Child("targetportal"), s.TargetPortal, longISCSIName))
	}
	switch {
	case s.SecretRef == nil && (s.DiscoveryCHAPAuth || s.SessionCHAPAuth):
		errs = append(errs, field.Required(fldPath.Child("secretRef"), ""))
	case s.SecretRef != nil && s.SecretRef.Name == "":
		errs = append(errs, field.Required(fldPath.Child("secretRef", "name"), ""))
	}
	return errs
}

const notISCSIName = "must be valid format"

// validateISCSI validates the fields that iSCSI volumes in pods and in PersistentVolumes have in
// common. typeError is the error for a target name of an unknown type.
func validateISCSI(s *corev1.ISCSIPersistentVolumeSource, typeError string, fldPath *field.Path) field.ErrorList {
	var errs field.ErrorList
	if s.IQN == "" {
		errs = append(errs, field.Required(fldPath.Child("iqn"), ""))
	} else {
		errs = append(errs, validateNodeName(s.IQN, typeError, fldPath.Child("iqn"))...)
	}
	if s.TargetPortal == "" {
		errs = append(errs, field.Required(fldPath.Child("targetPortal"), ""))
	} else {
		errs = append(errs, validatePortal(s.TargetPortal, fldPath.Child("targetPortal"))...)
	}
	if len(s.Portals) > mostPortals {
		errs = append(errs, field.TooMany(fldPath.Child("portals"), len(s.Portals), mostPortals))
	} else {
		for i, p := range s.Portals {
			errs = append(errs, validatePortal(p, fldPath.Child("portals").Index(i))...)
		}
	}
	if s.Lun < 0 || s.Lun > 255 {
		errs = append(errs, field.Invalid(fldPath.Child("lun"), s.Lun, utilvalidation.InclusiveRangeError(0, 255)))
	}
	if s.ISCSIInterface != "" && !iscsiInterfaces.MatchString(s.ISCSIInterface) {
		errs = append(errs, field.Invalid(fldPath.Child("iscsiInterface"), s.ISCSIInterface,
			"must be the name of an interface that iscsiadm has on the nodes, or default"))
	}
	if s.InitiatorName != nil {
		errs = append(errs, validateNodeName(*s.InitiatorName, typeError, fldPath.Child("initiatorname"))...)
	}
	return errs
}

func validateNodeName(name, otherKind string, fldPath *field.Path) field.ErrorList {
	switch {
	case !strings.HasPrefix(name, "iqn") && !strings.HasPrefix(name, "eui") && !strings.HasPrefix(name, "naa"):
		return field.ErrorList{field.Invalid(fldPath, name, otherKind)}
	case len(name) > 223:
		return field.ErrorList{field.TooLong(fldPath, "", 223)}
	case !nodeNames.MatchString(name):
		return field.ErrorList{field.Invalid(fldPath, name, notISCSIName)}
	}
	return nil
}

func validatePortal(portal string, fldPath *field.Path) field.ErrorList {
	if p, err := netip.ParseAddrPort(portal); err == nil && p.Port() != 0 && p.Addr().Zone() == "" {
		return nil
	}
	if a, err := netip.ParseAddr(strings.TrimSuffix(strings.TrimPrefix(portal, "["), "]")); err == nil &&
		a.Zone() == "" {
		return nil
	}
	return field.ErrorList{field.Invalid(fldPath, portal,
		"must be an IP address, with a port where that is not 3260, as 192.0.2.1:3261 or [2001:db8::1]:3261")}
}
