package resource

import (
	"slices"
	"strings"

	resourcev1 "k8s.io/api/resource/v1"
	metavalidation "k8s.io/apimachinery/pkg/apis/meta/v1/validation"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/utils/ptr"

	"keelson.dev/keelson/controlplane/api/kinds/core/podspec"
	"keelson.dev/keelson/controlplane/api/kinds/fieldrules"
)

func deviceKey(driver, pool, device, share string) string {
	key := strings.Join([]string{driver, pool, device}, "/")
	if share != "" {
		key += "/" + share
	}
	return key
}

// allocatedDevices returns the keys of the devices that are allocated to a claim.
func allocatedDevices(s *resourcev1.ResourceClaimStatus) map[string]bool {
	out := map[string]bool{}
	if s.Allocation != nil {
		for _, r := range s.Allocation.Devices.Results {
			out[deviceKey(r.Driver, r.Pool, r.Device, string(ptr.Deref(r.ShareID, "")))] = true
		}
	}
	return out
}

func statusKey(d resourcev1.AllocatedDeviceStatus) string {
	return deviceKey(d.Driver, d.Pool, d.Device, ptr.Deref(d.ShareID, ""))
}

// dropDeallocated removes the driver-reported status of devices that are no longer allocated. So a
// client that deallocates a claim does not have to remove that status itself.
func dropDeallocated(s, old *resourcev1.ResourceClaimStatus) {
	updated, previous := allocatedDevices(s), allocatedDevices(old)
	s.Devices = slices.DeleteFunc(s.Devices, func(d resourcev1.AllocatedDeviceStatus) bool {
		return previous[statusKey(d)] && !updated[statusKey(d)]
	})
	if len(s.Devices) == 0 {
		s.Devices = nil
	}
}

// ValidateClaimStatus validates the allocated devices of a claim, its reserved consumers, and the
// device status that drivers report. stored is the stored claim.
func ValidateClaimStatus(obj, stored *resourcev1.ResourceClaim, fldPath *field.Path) field.ErrorList {
	s, old := &obj.Status, &stored.Status
	errs := fieldrules.ValidateItems(s.ReservedFor, resourcev1.ResourceClaimReservedForMaxSize,
		fldPath.Child("reservedFor"),
		func(r resourcev1.ResourceClaimConsumerReference) string { return string(r.UID) },
		func(r resourcev1.ResourceClaimConsumerReference, fldPath *field.Path) field.ErrorList {
			var errs field.ErrorList
			for _, f := range []struct{ name, value string }{{"resource", r.Resource}, {"name", r.Name},
				{"uid", string(r.UID)}} {
				if f.value == "" {
					errs = append(errs, field.Required(fldPath.Child(f.name), ""))
				}
			}
			return errs
		})
	allocated := allocatedDevices(s)
	errs = append(errs, fieldrules.ValidateItems(s.Devices, -1, fldPath.Child("devices"),
		statusKey, func(d resourcev1.AllocatedDeviceStatus, fldPath *field.Path) field.ErrorList {
			return validateDeviceStatus(&d, allocated, fldPath)
		})...)
	reserved := fldPath.Child("reservedFor")
	switch {
	case len(s.ReservedFor) == 0:
	case s.Allocation == nil:
		errs = append(errs, field.Forbidden(reserved, "may not be specified when `allocated` is not set"))
	case obj.DeletionTimestamp != nil && slices.ContainsFunc(s.ReservedFor,
		func(r resourcev1.ResourceClaimConsumerReference) bool {
			return !slices.Contains(old.ReservedFor, r)
		}):
		errs = append(errs, field.Forbidden(reserved,
			"new entries may not be added while `deallocationRequested` or `deletionTimestamp` are set"))
	}
	switch {
	case s.Allocation == nil:
	case old.Allocation != nil:
		errs = append(errs, fieldrules.ValidateUnchanged(s.Allocation, old.Allocation, fldPath.Child("allocation"))...)
	default:
		errs = append(errs, validateAllocation(s.Allocation, newRequestNames(&obj.Spec.Devices),
			fldPath.Child("allocation"))...)
	}
	return errs
}

func validateAllocation(a *resourcev1.AllocationResult, names requestNames, fldPath *field.Path) field.ErrorList {
	devices := fldPath.Child("devices")
	errs := fieldrules.ValidateItems(a.Devices.Results, resourcev1.AllocationResultsMaxSize,
		devices.Child("results"), nil,
		func(r resourcev1.DeviceRequestAllocationResult, fldPath *field.Path) field.ErrorList {
			errs := names.validateRequestName(r.Request, fldPath.Child("request"))
			errs = append(errs, fieldrules.ValidateDriverName(r.Driver, fldPath.Child("driver"))...)
			errs = append(errs, validatePoolName(r.Pool, fldPath.Child("pool"))...)
			errs = append(errs, fieldrules.ValidateDNSLabel(r.Device, fldPath.Child("device"))...)
			errs = append(errs, validateBindingConditions(r.BindingConditions, r.BindingFailureConditions, fldPath)...)
			errs = append(errs, fieldrules.ValidateItems(r.Tolerations, resourcev1.DeviceTolerationsMaxLength,
				fldPath.Child("tolerations"), nil, validateDeviceToleration)...)
			if r.ShareID != nil {
				errs = append(errs, validateShareID(string(*r.ShareID), fldPath.Child("shareID"))...)
			}
			return append(errs, validateSkippedOperations(r.SkipNodeOperations, fldPath.Child("skipNodeOperations"))...)
		})
	errs = append(errs, fieldrules.ValidateItems(a.Devices.Config, 2*resourcev1.DeviceConfigMaxSize,
		devices.Child("config"),
		nil,
		func(c resourcev1.DeviceAllocationConfiguration, fldPath *field.Path) field.ErrorList {
			errs := fieldrules.ValidateOneOf(c.Source, fldPath.Child("source"), resourcev1.AllocationConfigSourceClaim,
				resourcev1.AllocationConfigSourceClass)
			errs = append(errs, fieldrules.ValidateItems(c.Requests, resourcev1.DeviceRequestsMaxSize,
				fldPath.Child("requests"),
				fieldrules.SelfKey, names.validateRequestName)...)
			return append(errs, validateDeviceConfig(&c.DeviceConfiguration, fldPath)...)
		})...)
	if a.NodeSelector != nil {
		errs = append(errs, podspec.ValidateNodeSelector(a.NodeSelector, fldPath.Child("nodeSelector"))...)
	}
	return errs
}

func validateDeviceStatus(
	d *resourcev1.AllocatedDeviceStatus, allocated map[string]bool, fldPath *field.Path,
) field.ErrorList {
	errs := fieldrules.ValidateDriverName(d.Driver, fldPath.Child("driver"))
	errs = append(errs, validatePoolName(d.Pool, fldPath.Child("pool"))...)
	errs = append(errs, fieldrules.ValidateDNSLabel(d.Device, fldPath.Child("device"))...)
	if d.ShareID != nil {
		errs = append(errs, validateShareID(*d.ShareID, fldPath.Child("shareID"))...)
	}
	if key := statusKey(*d); !allocated[key] {
		errs = append(errs, field.Invalid(fldPath, key, "must be an allocated device in the claim"))
	}
	if n := len(d.Conditions); n > resourcev1.AllocatedDeviceStatusMaxConditions {
		errs = append(errs, field.TooMany(fldPath.Child("conditions"), n,
			resourcev1.AllocatedDeviceStatusMaxConditions))
	}
	errs = append(errs, metavalidation.ValidateConditions(d.Conditions, fldPath.Child("conditions"))...)
	if d.Data != nil && len(d.Data.Raw) > 0 {
		errs = append(errs, validateRawObject(*d.Data, resourcev1.AllocatedDeviceStatusDataMaxLength,
			fldPath.Child("data"))...)
	}
	n := d.NetworkData
	if n == nil {
		return errs
	}
	network := fldPath.Child("networkData")
	if len(n.InterfaceName) > resourcev1.NetworkDeviceDataInterfaceNameMaxLength {
		errs = append(errs, field.TooLong(network.Child("interfaceName"), "",
			resourcev1.NetworkDeviceDataInterfaceNameMaxLength))
	}
	if len(n.HardwareAddress) > resourcev1.NetworkDeviceDataHardwareAddressMaxLength {
		errs = append(errs, field.TooLong(network.Child("hardwareAddress"), "",
			resourcev1.NetworkDeviceDataHardwareAddressMaxLength))
	}
	return append(errs, fieldrules.ValidateItems(n.IPs, resourcev1.NetworkDeviceDataMaxIPs, network.Child("ips"),
		fieldrules.SelfKey,
		func(ip string, fldPath *field.Path) field.ErrorList {
			return validation.IsValidInterfaceAddress(fldPath, ip)
		})...)
}

// validateShareID validates the UUID that identifies a share of a device.
func validateShareID(id string, fldPath *field.Path) field.ErrorList {
	right := len(id) == 36
	for i, c := range []byte(id) {
		dash := i == 8 || i == 13 || i == 18 || i == 23
		hex := c >= '0' && c <= '9' || c >= 'a' && c <= 'f'
		right = right && (dash && c == '-' || !dash && hex)
	}
	if !right {
		return field.ErrorList{field.Invalid(fldPath, id,
			"uid must be in RFC 4122 normalized form, `xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx` with lowercase "+
				"hexadecimal characters")}
	}
	return nil
}
