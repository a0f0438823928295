package kinds

import (
	"strings"
	"time"

	storagev1 "k8s.io/api/storage/v1"
	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"keelson.dev/keelson/controlplane/api"
)

func csiStorageCapacityKind() *api.Kind {
	k := newKind(names{
		gv: storagev1.SchemeGroupVersion, kind: "CSIStorageCapacity", conditional: true, plural: "csistoragecapacities", singular: "csistoragecapacity",
	}, func(l *storagev1.CSIStorageCapacityList) *[]storagev1.CSIStorageCapacity { return &l.Items })
	check(k, func(c *storagev1.CSIStorageCapacity) field.ErrorList {
		var errs field.ErrorList
		if c.NodeTopology != nil {
			errs = append(errs, validateSelector(c.NodeTopology, field.NewPath("nodeTopology"))...)
		}
		errs = append(errs, invalid(field.NewPath("storageClassName"), c.StorageClassName,
			apivalidation.NameIsDNSSubdomain(c.StorageClassName, false))...)
		if c.Capacity != nil && c.Capacity.Sign() < 0 {
			errs = append(errs, field.Invalid(field.NewPath("capacity"), c.Capacity.String(), apivalidation.IsNegativeErrorMsg))
		}
		return errs
	})
	checkUpdate(k, func(obj, old *storagev1.CSIStorageCapacity) field.ErrorList {
		errs := sameOr(obj.NodeTopology, old.NodeTopology, field.NewPath("nodeTopology"))
		return append(errs, sameOr(obj.StorageClassName, old.StorageClassName, field.NewPath("storageClassName"))...)
	})
	k.Columns = columns(nameCol, col("StorageClassName"), col("Capacity"))
	k.Row = row(func(c *storagev1.CSIStorageCapacity, _ time.Time) []any {
		capacity := unset
		if c.Capacity != nil {
			capacity = c.Capacity.String()
		}
		return []any{c.Name, c.StorageClassName, capacity}
	})
	return k
}

func volumeAttributesClassKind() *api.Kind {
	k := newKind(names{
		gv: storagev1.SchemeGroupVersion, kind: "VolumeAttributesClass", plural: "volumeattributesclasses",
		singular: "volumeattributesclass", short: []string{"vac"}, global: true,
	}, func(l *storagev1.VolumeAttributesClassList) *[]storagev1.VolumeAttributesClass { return &l.Items })
	k.ReturnsDeleted = true
	check(k, func(c *storagev1.VolumeAttributesClass) field.ErrorList {
		at := field.NewPath("driverName")
		var errs field.ErrorList
		if c.DriverName == "" {
			errs = append(errs, field.Required(at, ""))
		} else {
			errs = append(errs, invalid(at, c.DriverName, validation.IsQualifiedName(strings.ToLower(c.DriverName)))...)
		}
		errs = append(errs, validateParameters(c.Parameters, field.NewPath("parameters"))...)
		if len(c.Parameters) == 0 {
			errs = append(errs, field.Required(field.NewPath("parameters"), "must contain at least one key/value pair"))
		}
		return errs
	})
	checkUpdate(k, func(obj, old *storagev1.VolumeAttributesClass) field.ErrorList {
		var errs field.ErrorList
		if obj.DriverName != old.DriverName {
			errs = append(errs, field.Forbidden(field.NewPath("driverName"), "updates to driverName are forbidden."))
		}
		if !semanticEqual(obj.Parameters, old.Parameters) {
			errs = append(errs, field.Forbidden(field.NewPath("parameters"), "updates to parameters are forbidden."))
		}
		return errs
	})
	k.Columns = columns(nameCol, col("DriverName"), ageCol)
	k.Row = row(func(c *storagev1.VolumeAttributesClass, now time.Time) []any {
		return []any{c.Name, c.DriverName, age(c, now)}
	})
	return k
}
