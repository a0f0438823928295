package fieldrules

import (
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	metavalidation "k8s.io/apimachinery/pkg/apis/meta/v1/validation"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

// maxDriverName is the limit of CSI for the name in GetPluginInfoResponse.
const maxDriverName = 63

// ValidateDriverName returns the errors in the name of a CSI driver or of a device driver.
func ValidateDriverName(name string, at *field.Path) field.ErrorList {
	if name == "" {
		return field.ErrorList{field.Required(at, "")}
	}
	var errs field.ErrorList
	if len(name) > maxDriverName {
		errs = append(errs, field.TooLong(at, name, maxDriverName))
	}
	return append(errs, Invalid(at, name, validation.IsDNS1123Subdomain(strings.ToLower(name)))...)
}

// ValidateProtocol returns an error if p is not TCP, UDP or SCTP.
func ValidateProtocol(p corev1.Protocol, at *field.Path) field.ErrorList {
	return OneOf(p, at, corev1.ProtocolTCP, corev1.ProtocolUDP, corev1.ProtocolSCTP)
}

// ValidatePortNumOrName returns the errors in a port number or the name of a container's port.
func ValidatePortNumOrName(p intstr.IntOrString, at *field.Path) field.ErrorList {
	if p.Type == intstr.String {
		return Invalid(at, p.StrVal, validation.IsValidPortName(p.StrVal))
	}
	return Invalid(at, p.IntVal, validation.IsValidPortNum(int(p.IntVal)))
}

// ValidateSelector returns the errors in a label selector.
func ValidateSelector(s *metav1.LabelSelector, at *field.Path) field.ErrorList {
	if s == nil {
		return nil
	}
	return metavalidation.ValidateLabelSelector(s, metavalidation.LabelSelectorValidationOptions{}, at)
}
