package dns

import (
	"bufio"
	"fmt"
	"io"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/miekg/dns"
)

// countedTypes are the record types that are counted by name. All others count as "other", as in
// CoreDNS.
var countedTypes = []uint16{dns.TypeA, dns.TypeAAAA, dns.TypeSRV, dns.TypePTR, dns.TypeCNAME, dns.TypeTXT, dns.TypeMX,
	dns.TypeNS, dns.TypeSOA, dns.TypeHTTPS, dns.TypeANY}

// countedCodes are the response codes that are counted by name. All others count as "other".
var countedCodes = []int{dns.RcodeSuccess, dns.RcodeNameError, dns.RcodeServerFailure, dns.RcodeRefused,
	dns.RcodeFormatError, dns.RcodeNotImplemented}

// Bounds of the buckets of histograms: durations in seconds, and sizes in bytes.
var (
	durations = []float64{0.00025, 0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256, 0.512, 1.024,
		2.048, 4.096, 8.192}
	sizes = []float64{100, 200, 300, 400, 511, 1023, 2047, 4095, 8291, 16000, 32000, 48000, 64000}
)

// histogram counts values by bucket.
type histogram struct {
	bounds  []float64
	buckets []atomic.Uint64
	sum     atomic.Uint64 // sum of the values, in units of scale
	scale   float64
}

func newHistogram(bounds []float64, scale float64) *histogram {
	return &histogram{bounds: bounds, buckets: make([]atomic.Uint64, len(bounds)+1), scale: scale}
}

func (h *histogram) addValue(v float64) {
	i, _ := slices.BinarySearch(h.bounds, v)
	h.buckets[i].Add(1)
	h.sum.Add(uint64(v / h.scale))
}

// zoneCounters are the counters of the queries in one zone (server block). They remain until the
// server is closed, even if the block is removed.
type zoneCounters struct {
	zone     string
	requests [2][2][]atomic.Uint64 // by protocol (UDP, TCP), family (IPv4, IPv6) and type
	codes    []atomic.Uint64
	time     *histogram
	request  *histogram
	response *histogram

	hits, denials, misses, stale atomic.Uint64

	mu               sync.Mutex
	logErrors        bool
	log              *slog.Logger
	lastLogged       time.Time
	failuresSinceLog int // failures since the last log line
}

func newCounts(zone string, log *slog.Logger) *zoneCounters {
	c := &zoneCounters{zone: zone, log: log, codes: make([]atomic.Uint64, len(countedCodes)+1),
		time: newHistogram(durations, 1e-9), request: newHistogram(sizes, 1), response: newHistogram(sizes, 1)}
	for i := range c.requests {
		for j := range c.requests[i] {
			c.requests[i][j] = make([]atomic.Uint64, len(countedTypes)+1)
		}
	}
	return c
}

// countResponse counts one answered query by type, protocol (tcp), address family (v6) and response
// code. It also records the sizes of query and reply, and the time that the answer took.
func (c *zoneCounters) countResponse(kind uint16, tcp, v6 bool, rcode, queryBytes, replyBytes int, took time.Duration) {
	proto, family := 0, 0
	if tcp {
		proto = 1
	}
	if v6 {
		family = 1
	}
	t := slices.Index(countedTypes, kind)
	if t < 0 {
		t = len(countedTypes)
	}
	c.requests[proto][family][t].Add(1)
	r := slices.Index(countedCodes, rcode)
	if r < 0 {
		r = len(countedCodes)
	}
	c.codes[r].Add(1)
	c.time.addValue(took.Seconds())
	c.request.addValue(float64(queryBytes))
	c.response.addValue(float64(replyBytes))
}

func (c *zoneCounters) countHit(m *dns.Msg) {
	if m.Rcode == dns.RcodeSuccess && len(m.Answer) > 0 {
		c.hits.Add(1)
	} else {
		c.denials.Add(1)
	}
}

// logInterval is the time between two log lines about failed queries.
const logInterval = 10 * time.Second

// logFailure logs that a query could not be answered, if the Corefile enables logging of errors. It
// logs at most once per logInterval, with the number of failures since the last line.
func (c *zoneCounters) logFailure(name string, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.failuresSinceLog++
	if !c.logErrors || time.Since(c.lastLogged) < logInterval {
		return
	}
	c.log.Warn("a query could not be answered", "name", name, "zone", c.zone, "err", err, "since the last line",
		c.failuresSinceLog)
	c.lastLogged, c.failuresSinceLog = time.Now(), 0
}

// Metrics writes the metrics of the DNS server in the Prometheus text format, under the names of
// CoreDNS.
func (s *Server) Metrics(to io.Writer) error {
	w := &metricsWriter{w: bufio.NewWriter(to)}
	all := s.allZoneCounts()
	w.writeFamily("coredns_build_info", "gauge",
		"A metric with a constant '1' value labeled by version, revision, and goversion.")
	w.writeValue("coredns_build_info", 1, `goversion="",revision="",version="keelson"`)
	labels := func(zone, more string) string {
		l := `server="dns://:53",view="",zone="` + zone + `"`
		if more != "" {
			l += "," + more
		}
		return l
	}
	w.writeFamily("coredns_dns_requests_total", "counter",
		"Questions that were asked, by zone, protocol, family and type.")
	for _, c := range all {
		for p, proto := range []string{"udp", "tcp"} {
			for f := range 2 {
				for t := range c.requests[p][f] {
					if n := c.requests[p][f][t].Load(); n > 0 {
						w.writeValue("coredns_dns_requests_total", float64(n),
							labels(c.zone, fmt.Sprintf(`family="%d",proto="%s",type="%s"`, f+1, proto, typeName(t))))
					}
				}
			}
		}
	}
	w.writeFamily("coredns_dns_responses_total", "counter", "Answers, by zone and response code.")
	for _, c := range all {
		for i := range c.codes {
			if n := c.codes[i].Load(); n > 0 {
				w.writeValue("coredns_dns_responses_total", float64(n),
					labels(c.zone, `plugin="",rcode="`+codeName(i)+`"`))
			}
		}
	}
	w.writeFamily("coredns_dns_request_duration_seconds", "histogram", "The time that answers took.")
	for _, c := range all {
		w.writeHistogram("coredns_dns_request_duration_seconds", c.time, labels(c.zone, ""))
	}
	w.writeFamily("coredns_dns_request_size_bytes", "histogram", "The size of questions.")
	for _, c := range all {
		w.writeHistogram("coredns_dns_request_size_bytes", c.request, labels(c.zone, ""))
	}
	w.writeFamily("coredns_dns_response_size_bytes", "histogram", "The size of answers.")
	for _, c := range all {
		w.writeHistogram("coredns_dns_response_size_bytes", c.response, labels(c.zone, ""))
	}
	s.cacheMetrics(w, all)
	s.forwardMetrics(w)
	one := func(name, help string, v uint64) {
		w.writeFamily(name, "counter", help)
		w.writeValue(name, float64(v), "")
	}
	one("coredns_panics_total", "Questions that were not answered because of a fault of the server.", s.panics.Load())
	one("coredns_reload_failed_total", "Corefiles that were refused.", s.refused.Load())
	one("keelson_dns_dropped_total", "Packets of hosts that this server is not for.", s.dropped.Load())
	return w.w.Flush()
}

func (s *Server) cacheMetrics(w *metricsWriter, all []*zoneCounters) {
	cacheLabels := func(c *zoneCounters, kind string) string {
		return `server="dns://:53",type="` + kind + `",view="",zones="` + c.zone + `"`
	}
	w.writeFamily("coredns_cache_hits_total", "counter", "Questions that the cache answered.")
	for _, c := range all {
		w.writeValue("coredns_cache_hits_total", float64(c.hits.Load()), cacheLabels(c, "success"))
		w.writeValue("coredns_cache_hits_total", float64(c.denials.Load()), cacheLabels(c, "denial"))
	}
	w.writeFamily("coredns_cache_misses_total", "counter", "Questions that the cache did not answer.")
	for _, c := range all {
		w.writeValue("coredns_cache_misses_total", float64(c.misses.Load()),
			`server="dns://:53",view="",zones="`+c.zone+`"`)
	}
	w.writeFamily("coredns_cache_served_stale_total", "counter",
		"Questions that an answer was good enough for that had expired.")
	for _, c := range all {
		w.writeValue("coredns_cache_served_stale_total", float64(c.stale.Load()),
			`server="dns://:53",view="",zones="`+c.zone+`"`)
	}
	w.writeFamily("coredns_cache_entries", "gauge", "Answers in the cache.")
	if c := s.chain.Load(); c != nil {
		for _, b := range c.blocks {
			if b.cache != nil {
				good, none := b.cache.Len()
				w.writeValue("coredns_cache_entries", float64(good), cacheLabels(b.counts, "success"))
				w.writeValue("coredns_cache_entries", float64(none), cacheLabels(b.counts, "denial"))
			}
		}
	}
}

func (s *Server) forwardMetrics(w *metricsWriter) {
	c := s.chain.Load()
	if c == nil {
		return
	}
	var requests, failures, refused, down strings.Builder
	for _, b := range c.blocks {
		for _, r := range b.forwards {
			for _, n := range r.forwarder.Counts() {
				l := `proxy_name="forward",to="` + n.To + `",zone="` + b.counts.zone + `"`
				fmt.Fprintf(&requests, "coredns_forward_requests_total{%s} %d\n", l, n.Requests)
				fmt.Fprintf(&failures, "coredns_proxy_healthcheck_failures_total{%s} %d\n", l, n.Failures)
				state := 0
				if n.Down {
					state = 1
				}
				fmt.Fprintf(&down, "keelson_dns_upstream_down{%s} %d\n", l, state)
			}
			fmt.Fprintf(&refused, "coredns_forward_max_concurrent_rejects_total{zone=\"%s\"} %d\n", b.counts.zone,
				r.forwarder.Refused.Load())
		}
	}
	for _, f := range []struct {
		name, kind, help string
		lines            *strings.Builder
	}{
		{"coredns_forward_requests_total", "counter", "Questions that were forwarded, by server.", &requests},
		{"coredns_proxy_healthcheck_failures_total", "counter", "Questions that a server did not answer.", &failures},
		{"coredns_forward_max_concurrent_rejects_total", "counter", "Questions that found too many on their way.",
			&refused},
		{"keelson_dns_upstream_down", "gauge", "1 for a server that is left out because it does not answer.", &down},
	} {
		if f.lines.Len() > 0 {
			w.writeFamily(f.name, f.kind, f.help)
			_, _ = w.w.WriteString(f.lines.String())
		}
	}
}

func typeName(i int) string {
	if i < len(countedTypes) {
		return dns.TypeToString[countedTypes[i]]
	}
	return "other"
}

func codeName(i int) string {
	if i < len(countedCodes) {
		return dns.RcodeToString[countedCodes[i]]
	}
	return "other"
}

// metricsWriter writes the Prometheus text format. The buffer records errors and returns them from
// Flush.
type metricsWriter struct{ w *bufio.Writer }

func (w *metricsWriter) writeFamily(name, kind, help string) {
	fmt.Fprintf(w.w, "# HELP %s %s\n# TYPE %s %s\n", name, help, name, kind)
}

func (w *metricsWriter) writeValue(name string, v float64, labels string) {
	if labels != "" {
		labels = "{" + labels + "}"
	}
	fmt.Fprintf(w.w, "%s%s %v\n", name, labels, v)
}

func (w *metricsWriter) writeHistogram(name string, h *histogram, labels string) {
	total := uint64(0)
	for i, b := range h.bounds {
		total += h.buckets[i].Load()
		w.writeValue(name+"_bucket", float64(total), fmt.Sprintf(`%s,le="%v"`, labels, b))
	}
	total += h.buckets[len(h.bounds)].Load()
	w.writeValue(name+"_bucket", float64(total), labels+`,le="+Inf"`)
	w.writeValue(name+"_sum", float64(h.sum.Load())*h.scale, labels)
	w.writeValue(name+"_count", float64(total), labels)
}
