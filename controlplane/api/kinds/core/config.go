package core

import (
	"encoding/json"
	"maps"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/utils/ptr"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/kinds/builder"
	"keelson.dev/keelson/controlplane/api/kinds/fieldrules"
)

// ConfigMapKind returns the definition of the kind ConfigMap.
func ConfigMapKind() *api.Kind {
	k := builder.New(builder.Names{
		GroupVersion: corev1.SchemeGroupVersion, Kind: "ConfigMap", Plural: "configmaps", Singular: "configmap",
		Short: []string{"cm"},
	}, func(l *corev1.ConfigMapList) *[]corev1.ConfigMap { return &l.Items })
	builder.AddValidation(k, func(c *corev1.ConfigMap) field.ErrorList {
		var errs field.ErrorList
		size := 0
		for _, key := range fieldrules.SortedKeys(c.Data) {
			size += len(c.Data[key])
			errs = append(errs, fieldrules.InvalidErrors(field.NewPath("data").Key(key), key,
				validation.IsConfigMapKey(key))...)
			if _, twice := c.BinaryData[key]; twice {
				errs = append(errs, field.Invalid(field.NewPath("data").Key(key), key,
					"duplicate of key present in binaryData"))
			}
		}
		for _, key := range fieldrules.SortedKeys(c.BinaryData) {
			size += len(c.BinaryData[key])
			errs = append(errs, fieldrules.InvalidErrors(field.NewPath("binaryData").Key(key), key,
				validation.IsConfigMapKey(key))...)
		}
		return append(errs, validateTotalSize(size, field.NewPath(""))...)
	})
	builder.AddUpdateValidation(k, func(obj, old *corev1.ConfigMap) field.ErrorList {
		if !ptr.Deref(old.Immutable, false) {
			return nil
		}
		errs := validateStaysImmutable(obj.Immutable)
		if !maps.Equal(obj.Data, old.Data) {
			errs = append(errs, field.Forbidden(field.NewPath("data"), immutableMsg))
		}
		if !fieldrules.SemanticEqual(obj.BinaryData, old.BinaryData) {
			errs = append(errs, field.Forbidden(field.NewPath("binaryData"), immutableMsg))
		}
		return errs
	})
	k.Lists.Columns = builder.Columns(builder.NameColumn, builder.StringColumn("Data"), builder.AgeColumn)
	k.Lists.Row = builder.Row(func(c *corev1.ConfigMap, now time.Time) []any {
		return []any{c.Name, int64(len(c.Data) + len(c.BinaryData)), builder.Age(c, now)}
	})
	return k
}

// SecretKind returns the definition of the kind Secret.
func SecretKind() *api.Kind {
	k := builder.New(builder.Names{
		GroupVersion: corev1.SchemeGroupVersion, Kind: "Secret", Plural: "secrets", Singular: "secret",
	}, func(l *corev1.SecretList) *[]corev1.Secret { return &l.Items })
	k.Writes.Default = builder.Default(func(s *corev1.Secret) {
		builder.SetDefault(&s.Type, corev1.SecretTypeOpaque)
		// stringData is write-only: it is stored as data and never returned.
		if len(s.StringData) > 0 && s.Data == nil {
			s.Data = make(map[string][]byte, len(s.StringData))
		}
		for key, v := range s.StringData {
			s.Data[key] = []byte(v)
		}
		s.StringData = nil
	})
	builder.AddValidation(k, validateSecret)
	builder.AddUpdateValidation(k, func(obj, old *corev1.Secret) field.ErrorList {
		errs := fieldrules.ValidateUnchanged(obj.Type, old.Type, field.NewPath("type"))
		if !ptr.Deref(old.Immutable, false) {
			return errs
		}
		errs = append(errs, validateStaysImmutable(obj.Immutable)...)
		if !fieldrules.SemanticEqual(obj.Data, old.Data) {
			errs = append(errs, field.Forbidden(field.NewPath("data"), immutableMsg))
		}
		return errs
	})
	k.Lists.Columns = builder.Columns(builder.NameColumn, builder.StringColumn("Type"), builder.StringColumn("Data"),
		builder.AgeColumn)
	k.Lists.Row = builder.Row(func(s *corev1.Secret, now time.Time) []any {
		return []any{s.Name, string(s.Type), int64(len(s.Data)), builder.Age(s, now)}
	})
	k.Lists.Fields = builder.Fields(func(s *corev1.Secret) fields.Set { return fields.Set{"type": string(s.Type)} })
	return k
}

// secretKeys are the keys that a Secret of a type must have.
var secretKeys = map[corev1.SecretType][]string{
	corev1.SecretTypeTLS:              {corev1.TLSCertKey, corev1.TLSPrivateKeyKey},
	corev1.SecretTypeDockerConfigJson: {corev1.DockerConfigJsonKey},
	corev1.SecretTypeDockercfg:        {corev1.DockerConfigKey},
}

// secretJSON are the keys with values that must be JSON objects, by the type of the Secret.
var secretJSON = map[corev1.SecretType]string{
	corev1.SecretTypeDockerConfigJson: corev1.DockerConfigJsonKey,
	corev1.SecretTypeDockercfg:        corev1.DockerConfigKey,
}

func validateSecret(s *corev1.Secret) field.ErrorList {
	var errs field.ErrorList
	data := field.NewPath("data")
	size := 0
	for _, key := range fieldrules.SortedKeys(s.Data) {
		size += len(s.Data[key])
		errs = append(errs, fieldrules.InvalidErrors(data.Key(key), key, validation.IsConfigMapKey(key))...)
	}
	errs = append(errs, validateTotalSize(size, data)...)
	for _, key := range secretKeys[s.Type] {
		if _, ok := s.Data[key]; !ok {
			errs = append(errs, field.Required(data.Key(key), ""))
		}
	}
	if key := secretJSON[s.Type]; key != "" {
		if value, ok := s.Data[key]; ok {
			var parsed map[string]any
			if err := json.Unmarshal(value, &parsed); err != nil {
				errs = append(errs, field.Invalid(data.Key(key), "<secret contents redacted>", err.Error()))
			}
		}
	}
	switch s.Type {
	case corev1.SecretTypeSSHAuth:
		if len(s.Data[corev1.SSHAuthPrivateKey]) == 0 {
			errs = append(errs, field.Required(data.Key(corev1.SSHAuthPrivateKey), ""))
		}
	case corev1.SecretTypeBasicAuth:
		_, user := s.Data[corev1.BasicAuthUsernameKey]
		_, password := s.Data[corev1.BasicAuthPasswordKey]
		if !user && !password {
			errs = append(errs, field.Required(data.Key(corev1.BasicAuthUsernameKey), ""),
				field.Required(data.Key(corev1.BasicAuthPasswordKey), ""))
		}
	case corev1.SecretTypeServiceAccountToken:
		if s.Annotations[corev1.ServiceAccountNameKey] == "" {
			errs = append(errs, field.Required(field.NewPath("metadata",
				"annotations").Key(corev1.ServiceAccountNameKey), ""))
		}
	}
	return errs
}

const immutableMsg = "field is immutable when `immutable` is set"

func validateStaysImmutable(immutable *bool) field.ErrorList {
	if ptr.Deref(immutable, false) {
		return nil
	}
	return field.ErrorList{field.Forbidden(field.NewPath("immutable"), immutableMsg)}
}

func validateTotalSize(size int, fldPath *field.Path) field.ErrorList {
	if size > corev1.MaxSecretSize {
		return field.ErrorList{field.TooLong(fldPath, "", corev1.MaxSecretSize)}
	}
	return nil
}
