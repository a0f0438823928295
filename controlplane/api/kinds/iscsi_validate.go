package kinds

import (
	"net/netip"
	"regexp"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

const noSecret = "chapAuthDiscovery and chapAuthSession take the name of a Secret with the user names and passwords"

// nodeNames are names of iSCSI nodes, which targets and initiators are: iqn, eui or naa, without what could not be a part of
// a file's name.
var (
	nodeNames       = regexp.MustCompile(`^(iqn\.[0-9]{4}-[0-9]{2}\.[[:alnum:].-]+(:[^,;*&$|/\s]+)?|eui\.[[:xdigit:]]{16}|naa\.([[:xdigit:]]{16}|[[:xdigit:]]{32}))$`)
	iscsiInterfaces = regexp.MustCompile(`^[[:alnum:]][[:alnum:]._:-]{0,63}$`)
)

// mostPortals of a target, at all of which a node logs in at once.
const mostPortals = 32

func validateInlineISCSI(s *corev1.ISCSIVolumeSource, volume string, at *field.Path) field.ErrorList {
	errs := validateISCSI(&corev1.ISCSIPersistentVolumeSource{TargetPortal: s.TargetPortal, IQN: s.IQN, Lun: s.Lun, ISCSIInterface: s.ISCSIInterface,
		Portals: s.Portals, InitiatorName: s.InitiatorName}, volume, at)
	if (s.DiscoveryCHAPAuth || s.SessionCHAPAuth) && (s.SecretRef == nil || s.SecretRef.Name == "") {
		errs = append(errs, field.Required(at.Child("secretRef"), noSecret))
	}
	return errs
}

// validateISCSI judges what volumes of pods and PersistentVolumes say in the same way. The volume's name is part of that of an
// interface where initiatorName is set.
func validateISCSI(s *corev1.ISCSIPersistentVolumeSource, volume string, at *field.Path) field.ErrorList {
	errs := validateNodeName(s.IQN, at.Child("iqn"))
	if s.TargetPortal == "" {
		errs = append(errs, field.Required(at.Child("targetPortal"), "an IP address, or one with a port"))
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
		errs = append(errs, field.Invalid(at.Child("lun"), s.Lun, "must be between 0 and 255, inclusive"))
	}
	if s.ISCSIInterface != "" && !iscsiInterfaces.MatchString(s.ISCSIInterface) {
		errs = append(errs, field.Invalid(at.Child("iscsiInterface"), s.ISCSIInterface, "must be the name of an interface that iscsiadm has on the nodes, or default"))
	}
	if s.InitiatorName == nil {
		return errs
	}
	errs = append(errs, validateNodeName(*s.InitiatorName, at.Child("initiatorName"))...)
	if len(s.TargetPortal)+1+len(volume) > 64 {
		errs = append(errs, field.Invalid(at.Child("targetPortal"), s.TargetPortal,
			"targetPortal and the volume's name must have 63 characters together where initiatorName is set: they name an interface"))
	}
	return errs
}

func validateNodeName(name string, at *field.Path) field.ErrorList {
	switch {
	case name == "":
		return field.ErrorList{field.Required(at, "a name such as iqn.2026-01.com.example:disks")}
	case len(name) > 223:
		return field.ErrorList{field.TooLong(at, "", 223)}
	case !nodeNames.MatchString(name):
		return field.ErrorList{field.Invalid(at, name, "must be valid format: iqn.YYYY-MM.DOMAIN:NAME, eui. with 16 hexadecimal digits, or naa. with 16 or 32")}
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
