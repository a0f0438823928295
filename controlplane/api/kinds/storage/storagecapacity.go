package storage

import (
	"strings"
	"time"

	storagev1 "k8s.io/api/storage/v1"
	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/kinds/builder"
	"keelson.dev/keelson/controlplane/api/kinds/fieldrules"
)

// CSIStorageCapacityKind returns the definition of the kind CSIStorageCapacity.
func CSIStorageCapacityKind() *api.Kind {
	k := builder.New(builder.Names{
		GroupVersion: storagev1.SchemeGroupVersion, Kind: "CSIStorageCapacity", Conditional: true,
		Plural: "csistoragecapacities", Singular: "csistoragecapacity",
	}, func(l *storagev1.CSIStorageCapacityList) *[]storagev1.CSIStorageCapacity { return &l.Items })
	builder.AddValidation(k, func(c *storagev1.CSIStorageCapacity) field.ErrorList {
		var errs field.ErrorList
		if c.NodeTopology != nil {
			errs = append(errs, fieldrules.ValidateSelector(c.NodeTopology, field.NewPath("nodeTopology"))...)
		}
		errs = append(errs, fieldrules.InvalidErrors(field.NewPath("storageClassName"), c.StorageClassName,
			apivalidation.NameIsDNSSubdomain(c.StorageClassName, false))...)
		if c.Capacity != nil && c.Capacity.Sign() < 0 {
			errs = append(errs, field.Invalid(field.NewPath("capacity"), c.Capacity.String(),
				apivalidation.IsNegativeErrorMsg))
		}
		return errs
	})
	builder.AddUpdateValidation(k, func(obj, old *storagev1.CSIStorageCapacity) field.ErrorList {
		errs := fieldrules.ValidateUnchanged(obj.NodeTopology, old.NodeTopology, field.NewPath("nodeTopology"))
		return append(errs, fieldrules.ValidateUnchanged(obj.StorageClassName, old.StorageClassName,
			field.NewPath("storageClassName"))...)
	})
	k.Lists.Columns = builder.Columns(builder.NameColumn, builder.StringColumn("StorageClassName"),
		builder.StringColumn("Capacity"))
	k.Lists.Row = builder.Row(func(c *storagev1.CSIStorageCapacity, _ time.Time) []any {
		capacity := builder.Unset
		if c.Capacity != nil {
			capacity = c.Capacity.String()
		}
		return []any{c.Name, c.StorageClassName, capacity}
	})
	return k
}

// VolumeAttributesClassKind returns the definition of the kind VolumeAttributesClass.
func VolumeAttributesClassKind() *api.Kind {
	k := builder.New(builder.Names{
		GroupVersion: storagev1.SchemeGroupVersion, Kind: "VolumeAttributesClass", Plural: "volumeattributesclasses",
		Singular: "volumeattributesclass", Short: []string{"vac"}, ClusterScoped: true,
	}, func(l *storagev1.VolumeAttributesClassList) *[]storagev1.VolumeAttributesClass { return &l.Items })
	k.Deletion.ReturnsDeleted = true
	builder.AddValidation(k, func(c *storagev1.VolumeAttributesClass) field.ErrorList {
		fldPath := field.NewPath("driverName")
		var errs field.ErrorList
		if c.DriverName == "" {
			errs = append(errs, field.Required(fldPath, ""))
		} else {
			errs = append(errs, fieldrules.InvalidErrors(fldPath, c.DriverName,
				validation.IsQualifiedName(strings.ToLower(c.DriverName)))...)
		}
		errs = append(errs, validateParameters(c.Parameters, field.NewPath("parameters"))...)
		if len(c.Parameters) == 0 {
			errs = append(errs, field.Required(field.NewPath("parameters"), "must contain at least one key/value pair"))
		}
		return errs
	})
	builder.AddUpdateValidation(k, func(obj, old *storagev1.VolumeAttributesClass) field.ErrorList {
		var errs field.ErrorList
		if obj.DriverName != old.DriverName {
			errs = append(errs, field.Forbidden(field.NewPath("driverName"), "updates to driverName are forbidden."))
		}
		if !fieldrules.SemanticEqual(obj.Parameters, old.Parameters) {
			errs = append(errs, field.Forbidden(field.NewPath("parameters"), "updates to parameters are forbidden."))
		}
		return errs
	})
	k.Lists.Columns = builder.Columns(builder.NameColumn, builder.StringColumn("DriverName"), builder.AgeColumn)
	k.Lists.Row = builder.Row(func(c *storagev1.VolumeAttributesClass, now time.Time) []any {
		return []any{c.Name, c.DriverName, builder.Age(c, now)}
	})
	return k
}
