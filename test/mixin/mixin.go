// Package mixin has the list of series that the rules, alerts and dashboards of kubernetes-mixin
// read. Rows for etcd, Windows, and API priority and fairness are left out.
package mixin

import (
	_ "embed"
	"strings"
)

//go:embed series.tsv
var table string

// Sources in Series.Source that each replica of the control plane serves at /metrics.
const (
	SourceAPIServer         = "kube-apiserver"
	SourceScheduler         = "kube-scheduler"
	SourceControllerManager = "kube-controller-manager"
)

// Series is a row of the list: a metric that kubernetes-mixin reads from a source.
type Series struct {
	Source string   // component of Kubernetes that has the metric; by default also the scrape job
	Metric string   // name in queries; of a histogram with _bucket or _count
	Labels []string // labels that the queries use, apart from those that Prometheus adds
	Serves []string // rule groups, alerts and panels with such a query
}

// Read returns the rows of the list, in its order. It panics if a row does not have four columns.
func Read() []Series {
	var all []Series
	for i, line := range strings.Split(strings.TrimSpace(table), "\n") {
		columns := strings.Split(line, "\t")
		if len(columns) != 4 {
			panic("series.tsv: not four columns: " + line)
		}
		if i == 0 { // the heading
			continue
		}
		s := Series{Source: columns[0], Metric: columns[1], Serves: strings.Split(columns[3], "; ")}
		if columns[2] != "-" {
			s.Labels = strings.Split(columns[2], ",")
		}
		all = append(all, s)
	}
	return all
}

// Selector returns the PromQL selector of the series that have all labels of the row.
func (s *Series) Selector() string {
	matchers := make([]string, 0, len(s.Labels))
	for _, label := range s.Labels {
		matchers = append(matchers, label+`!=""`)
	}
	return s.Metric + "{" + strings.Join(matchers, ",") + "}"
}
