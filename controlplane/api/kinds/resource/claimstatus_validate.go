package resource

import (
	"slices"
	"strings"

	resourcev1 "k8s.io/api/resource/v1"
	metavalidation "k8s.io/apimachinery/pkg/apis/meta/v1/validation"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"

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
			out[deviceKey(r.Driver, r.Pool, r.Device, string(fieldrules.Deref(r.ShareID)))] = true
		}
	}
	return out
}

func statusKey(d resourcev1.AllocatedDeviceStatus) string {
	return deviceKey(d.Driver, d.Pool, d.Device, fieldrules.Deref(d.ShareID))
}

// dropDeallocated removes the driver-reported status of devices that are no longer allocated. So a
// client that deallocates a claim need not remove it.
func dropDeallocated(s, old *resourcev1.ResourceClaimStatus) {
	now, was := allocatedDevices(s), allocatedDevices(old)
	s.Devices = slices.DeleteFunc(s.Devices, func(d resourcev1.AllocatedDeviceStatus) bool {
		return was[statusKey(d)] && !now[statusKey(d)]
	})
	if len(s.Devices) == 0 {
		s.Devices = nil
	}
}

// ValidateClaimStatus validates the allocated devices of a claim, its reserved consumers, and the
// device status that drivers report. was is the stored claim.
func ValidateClaimStatus(obj, was *resourcev1.ResourceClaim, at *field.Path) field.ErrorList {
	s, old := &obj.Status, &was.Status
	errs := fieldrules.Items(s.ReservedFor, resourcev1.ResourceClaimReservedForMaxSize, at.Child("reservedFor"),
		func(r resourcev1.ResourceClaimConsumerReference) string { return string(r.UID) },
		func(r resourcev1.ResourceClaimConsumerReference, at *field.Path) field.ErrorList {
			var errs field.ErrorList
			for _, f := range []struct{ name, value string }{{"resource", r.Resource}, {"name", r.Name}, {"uid", string(r.UID)}} {
				if f.value == "" {
					errs = append(errs, field.Required(at.Child(f.name), ""))
				}
			}
			return errs
		})
	allocated := allocatedDevices(s)
	errs = append(errs, fieldrules.Items(s.Devices, -1, at.Child("devices"),
		statusKey, func(d resourcev1.AllocatedDeviceStatus, at *field.Path) field.ErrorList {
			return validateDeviceStatus(&d, allocated, at)
		})...)
	reserved := at.Child("reservedFor")
	switch {
	case len(s.ReservedFor) == 0:
	case s.Allocation == nil:
		errs = append(errs, field.Forbidden(reserved, "may not be specified when `allocated` is not set"))
	case obj.DeletionTimestamp != nil && slices.ContainsFunc(s.ReservedFor, func(r resourcev1.ResourceClaimConsumerReference) bool {
		return !slices.Contains(old.ReservedFor, r)
	}):
		errs = append(errs, field.Forbidden(reserved, "new entries may not be added while `deallocationRequested` or `deletionTimestamp` are set"))
	}
	switch {
	case s.Allocation == nil:
	case old.Allocation != nil:
		errs = append(errs, fieldrules.Unchanged(s.Allocation, old.Allocation, at.Child("allocation"))...)
	default:
		errs = append(errs, validateAllocation(s.Allocation, namesOfRequests(&obj.Spec.Devices), at.Child("allocation"))...)
	}
	return errs
}

func validateAllocation(a *resourcev1.AllocationResult, names requestNames, at *field.Path) field.ErrorList {
	devices := at.Child("devices")
	errs := fieldrules.Items(a.Devices.Results, resourcev1.AllocationResultsMaxSize, devices.Child("results"), nil,
		func(r resourcev1.DeviceRequestAllocationResult, at *field.Path) field.ErrorList {
			errs := names.reference(r.Request, at.Child("request"))
			errs = append(errs, fieldrules.ValidateDriverName(r.Driver, at.Child("driver"))...)
			errs = append(errs, poolName(r.Pool, at.Child("pool"))...)
			errs = append(errs, fieldrules.DNSLabel(r.Device, at.Child("device"))...)
			errs = append(errs, bindingConditions(r.BindingConditions, r.BindingFailureConditions, at)...)
			errs = append(errs, fieldrules.Items(r.Tolerations, resourcev1.DeviceTolerationsMaxLength,
				at.Child("tolerations"), nil, validateDeviceToleration)...)
			if r.ShareID != nil {
				errs = append(errs, shareID(string(*r.ShareID), at.Child("shareID"))...)
			}
			return append(errs, skippedOperations(r.SkipNodeOperations, at.Child("skipNodeOperations"))...)
		})
	errs = append(errs, fieldrules.Items(a.Devices.Config, 2*resourcev1.DeviceConfigMaxSize, devices.Child("config"),
		nil,
		func(c resourcev1.DeviceAllocationConfiguration, at *field.Path) field.ErrorList {
			errs := fieldrules.OneOf(c.Source, at.Child("source"), resourcev1.AllocationConfigSourceClaim,
				resourcev1.AllocationConfigSourceClass)
			errs = append(errs, fieldrules.Items(c.Requests, resourcev1.DeviceRequestsMaxSize, at.Child("requests"),
				fieldrules.Itself, names.reference)...)
			return append(errs, validateDeviceConfig(&c.DeviceConfiguration, at)...)
		})...)
	if a.NodeSelector != nil {
		errs = append(errs, podspec.ValidateNodeSelector(a.NodeSelector, at.Child("nodeSelector"))...)
	}
	return errs
}

func validateDeviceStatus(d *resourcev1.AllocatedDeviceStatus, allocated map[string]bool, at *field.Path) field.ErrorList {
	errs := fieldrules.ValidateDriverName(d.Driver, at.Child("driver"))
	errs = append(errs, poolName(d.Pool, at.Child("pool"))...)
	errs = append(errs, fieldrules.DNSLabel(d.Device, at.Child("device"))...)
	if d.ShareID != nil {
		errs = append(errs, shareID(*d.ShareID, at.Child("shareID"))...)
	}
	if key := statusKey(*d); !allocated[key] {
		errs = append(errs, field.Invalid(at, key, "must be an allocated device in the claim"))
	}
	if n := len(d.Conditions); n > resourcev1.AllocatedDeviceStatusMaxConditions {
		errs = append(errs, field.TooMany(at.Child("conditions"), n, resourcev1.AllocatedDeviceStatusMaxConditions))
	}
	errs = append(errs, metavalidation.ValidateConditions(d.Conditions, at.Child("conditions"))...)
	if d.Data != nil && len(d.Data.Raw) > 0 {
		errs = append(errs, rawObject(*d.Data, resourcev1.AllocatedDeviceStatusDataMaxLength, at.Child("data"))...)
	}
	n := d.NetworkData
	if n == nil {
		return errs
	}
	network := at.Child("networkData")
	if len(n.InterfaceName) > resourcev1.NetworkDeviceDataInterfaceNameMaxLength {
		errs = append(errs, field.TooLong(network.Child("interfaceName"), "", resourcev1.NetworkDeviceDataInterfaceNameMaxLength))
	}
	if len(n.HardwareAddress) > resourcev1.NetworkDeviceDataHardwareAddressMaxLength {
		errs = append(errs, field.TooLong(network.Child("hardwareAddress"), "", resourcev1.NetworkDeviceDataHardwareAddressMaxLength))
	}
	return append(errs, fieldrules.Items(n.IPs, resourcev1.NetworkDeviceDataMaxIPs, network.Child("ips"),
		fieldrules.Itself,
		func(ip string, at *field.Path) field.ErrorList { return validation.IsValidInterfaceAddress(at, ip) })...)
}

// shareID validates the UUID of a share of a device.
func shareID(id string, at *field.Path) field.ErrorList {
	right := len(id) == 36
	for i, c := range []byte(id) {
		dash := i == 8 || i == 13 || i == 18 || i == 23
		hex := c >= '0' && c <= '9' || c >= 'a' && c <= 'f'
		right = right && (dash && c == '-' || !dash && hex)
	}
	if !right {
		return field.ErrorList{field.Invalid(at, id,
			"uid must be in RFC 4122 normalized form, `xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx` with lowercase hexadecimal characters")}
	}
	return nil
}
