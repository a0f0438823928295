package criconfig

import (
	"fmt"
	"maps"
	"net"
	"slices"
	"strconv"
	"strings"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"keelson.dev/keelson/agent"
)

// expandVariables replaces $(NAME) by its value and $$ by $, and leaves unknown names unchanged.
func expandVariables(text string, lookup func(string) (string, bool)) string {
	if !strings.Contains(text, "$") {
		return text
	}
	var b strings.Builder
	for i := 0; i < len(text); i++ {
		if text[i] != '$' || i+1 == len(text) {
			b.WriteByte(text[i])
			continue
		}
		switch text[i+1] {
		case '$':
			b.WriteByte('$')
			i++
		case '(':
			end := strings.IndexByte(text[i:], ')')
			if end < 0 {
				b.WriteByte(text[i])
				continue
			}
			name := text[i+2 : i+end]
			if v, ok := lookup(name); ok {
				b.WriteString(v)
			} else {
				b.WriteString(text[i : i+end+1])
			}
			i += end
		default:
			b.WriteByte(text[i])
		}
	}
	return b.String()
}

// environment holds the inputs of a container's environment.
type environment struct {
	objects     agent.Objects
	pod         *v1.Pod // the pod with its status, for the downward API
	allocatable v1.ResourceList
}

// buildVariables returns the container's environment in the order of its definition, followed by
// the service variables.
func (e environment) buildVariables(spec *v1.Container) ([]*cri.KeyValue, error) {
	services := e.serviceVariables()
	values := map[string]string{}
	var order []string
	set := func(name, value string) {
		if _, ok := values[name]; !ok {
			order = append(order, name)
		}
		values[name] = value
	}
	for i := range spec.EnvFrom {
		if err := e.addSource(&spec.EnvFrom[i], set); err != nil {
			return nil, err
		}
	}
	lookup := func(name string) (string, bool) {
		if v, ok := values[name]; ok {
			return v, true
		}
		v, ok := services[name]
		return v, ok
	}
	for i := range spec.Env {
		v := &spec.Env[i]
		value, ok, err := e.resolveVariable(spec, v)
		if err != nil {
			return nil, err
		}
		if !ok {
			continue
		}
		if v.ValueFrom == nil {
			value = expandVariables(value, lookup)
		}
		set(v.Name, value)
	}
	for _, name := range slices.Sorted(maps.Keys(services)) {
		if _, ok := values[name]; !ok {
			set(name, services[name])
		}
	}
	out := make([]*cri.KeyValue, 0, len(order))
	for _, name := range order {
		out = append(out, &cri.KeyValue{Key: name, Value: []byte(values[name])})
	}
	return out, nil
}

func (e environment) addSource(source *v1.EnvFromSource, set func(name, value string)) error {
	data := map[string]string{}
	switch {
	case source.ConfigMapRef != nil:
		cm, ok := e.objects.ConfigMap(e.pod.Namespace, source.ConfigMapRef.Name)
		if !ok {
			if source.ConfigMapRef.Optional != nil && *source.ConfigMapRef.Optional {
				return nil
			}
			return fmt.Errorf("configmap %q not found", source.ConfigMapRef.Name)
		}
		maps.Copy(data, cm.Data)
	case source.SecretRef != nil:
		s, ok := e.objects.Secret(e.pod.Namespace, source.SecretRef.Name)
		if !ok {
			if source.SecretRef.Optional != nil && *source.SecretRef.Optional {
				return nil
			}
			return fmt.Errorf("secret %q not found", source.SecretRef.Name)
		}
		for k, v := range s.Data {
			data[k] = string(v)
		}
	}
	for _, k := range slices.Sorted(maps.Keys(data)) {
		if len(validation.IsRelaxedEnvVarName(source.Prefix+k)) == 0 {
			set(source.Prefix+k, data[k])
		}
	}
	return nil
}

// resolveVariable returns the value of one variable. ok is false if an optional source does not
// exist.
func (e environment) resolveVariable(spec *v1.Container, variable *v1.EnvVar) (value string, ok bool, err error) {
	f := variable.ValueFrom
	switch {
	case f == nil:
		return variable.Value, true, nil
	case f.FieldRef != nil:
		value, err = agent.FieldValue(e.pod, f.FieldRef.FieldPath)
		return value, true, err
	case f.ResourceFieldRef != nil:
		value, err = agent.ResourceValue(e.pod, spec.Name, f.ResourceFieldRef, e.allocatable)
		return value, true, err
	case f.ConfigMapKeyRef != nil:
		r := f.ConfigMapKeyRef
		optional := r.Optional != nil && *r.Optional
		cm, found := e.objects.ConfigMap(e.pod.Namespace, r.Name)
		if !found {
			return "", false, errorUnlessOptional(optional, fmt.Errorf("configmap %q not found", r.Name))
		}
		if value, found = cm.Data[r.Key]; !found {
			return "", false, errorUnlessOptional(optional,
				fmt.Errorf("couldn't find key %v in ConfigMap %v/%v", r.Key, e.pod.Namespace, r.Name))
		}
		return value, true, nil
	case f.SecretKeyRef != nil:
		r := f.SecretKeyRef
		optional := r.Optional != nil && *r.Optional
		s, found := e.objects.Secret(e.pod.Namespace, r.Name)
		if !found {
			return "", false, errorUnlessOptional(optional, fmt.Errorf("secret %q not found", r.Name))
		}
		b, found := s.Data[r.Key]
		if !found {
			return "", false, errorUnlessOptional(optional,
				fmt.Errorf("couldn't find key %v in Secret %v/%v", r.Key, e.pod.Namespace, r.Name))
		}
		return string(b), true, nil
	}
	return "", true, nil
}

func errorUnlessOptional(optional bool, err error) error {
	if optional {
		return nil
	}
	return err
}

// serviceVariables returns the environment variables of Services: default/kubernetes always, and
// the Services of the pod's namespace unless enableServiceLinks is false.
func (e environment) serviceVariables() map[string]string {
	out := map[string]string{}
	links := e.pod.Spec.EnableServiceLinks == nil || *e.pod.Spec.EnableServiceLinks
	for _, s := range e.objects.Services() {
		master := s.Namespace == "default" && s.Name == "kubernetes"
		if !master && (!links || s.Namespace != e.pod.Namespace) {
			continue
		}
		if s.Spec.ClusterIP == "" || s.Spec.ClusterIP == v1.ClusterIPNone || len(s.Spec.Ports) == 0 {
			continue
		}
		addServiceVariables(s, out)
	}
	return out
}

func addServiceVariables(service *v1.Service, out map[string]string) {
	name, ip := variableName(service.Name), service.Spec.ClusterIP
	out[name+"_SERVICE_HOST"] = ip
	out[name+"_SERVICE_PORT"] = strconv.Itoa(int(service.Spec.Ports[0].Port))
	for i, p := range service.Spec.Ports {
		port := strconv.Itoa(int(p.Port))
		if p.Name != "" {
			out[name+"_SERVICE_PORT_"+variableName(p.Name)] = port
		}
		proto := string(p.Protocol)
		if proto == "" {
			proto = "TCP"
		}
		url := strings.ToLower(proto) + "://" + net.JoinHostPort(ip, port)
		prefix := name + "_PORT_" + port + "_" + strings.ToUpper(proto)
		if i == 0 {
			out[name+"_PORT"] = url
		}
		out[prefix] = url
		out[prefix+"_PROTO"] = strings.ToLower(proto)
		out[prefix+"_PORT"] = port
		out[prefix+"_ADDR"] = ip
	}
}

func variableName(text string) string { return strings.ToUpper(strings.ReplaceAll(text, "-", "_")) }
