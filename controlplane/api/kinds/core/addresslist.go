package core

import (
	"fmt"
	"net"
	"strings"

	"k8s.io/apimachinery/pkg/util/validation/field"
)

// shownEndpoints is the maximum number of endpoints in a table cell. The cell then contains the
// number of the remaining endpoints.
const shownEndpoints = 3

// FormatAddresses returns the first shownEndpoints addresses, joined by commas. moreFormat is the
// format for the number of the remaining addresses. emptyText is returned for an empty list.
func FormatAddresses(addresses []string, moreFormat, emptyText string) string {
	if len(addresses) == 0 {
		return emptyText
	}
	if len(addresses) <= shownEndpoints {
		return strings.Join(addresses, ",")
	}
	return strings.Join(addresses[:shownEndpoints], ",") + fmt.Sprintf(moreFormat, len(addresses)-shownEndpoints)
}

// ValidateNonSpecialIP returns an error if an address cannot be an endpoint: unspecified, loopback,
// link-local and multicast addresses.
func ValidateNonSpecialIP(address string, fldPath *field.Path) field.ErrorList {
	var errs field.ErrorList
	refuse := func(special bool, why string) {
		if special {
			errs = append(errs, field.Invalid(fldPath, address, why))
		}
	}
	ip := net.ParseIP(address)
	if ip == nil {
		return field.ErrorList{field.Invalid(fldPath, address, "must be a valid IP address")}
	}
	refuse(ip.IsUnspecified(), fmt.Sprintf("may not be unspecified (%v)", address))
	refuse(ip.IsLoopback(), "may not be in the loopback range (127.0.0.0/8, ::1/128)")
	refuse(ip.IsLinkLocalUnicast(), "may not be in the link-local range (169.254.0.0/16, fe80::/10)")
	refuse(ip.IsLinkLocalMulticast(), "may not be in the link-local multicast range (224.0.0.0/24, ff02::/10)")
	return errs
}
